"""Dropout under tensor parallelism: which ranks must draw the same mask, and masks that are drawn early.

Replicated tensors need the same dropout mask on every rank, or the replicas drift apart.  Sharded tensors need a
different mask on each rank, or every shard repeats one pattern.  So each rank has two streams of random numbers.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import ConfigError, shown
from actmem.drop import KEEP_ALL, NamedForward
from actmem.keep import Kept, keep, stays_eager
from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import child_seed, fresh_seed
from actmem.recompute import digest_of, other_numbers
from actmem.torch_private import backward_pass


class DropoutStreams:
    """Two random-number generators for dropout: one with equal numbers on all ranks, one with different numbers.

    A deep copy draws the same numbers as the original. So don't copy one for several layers; give each its own seed.

    Args:
        seed: a seed, the same on all ranks of the group.
        tp: the tensor-parallel group.
        device: the device on which dropout masks are drawn.

    Attributes:
        replicated: draws the same numbers on all ranks of the group.
        sharded: draws different numbers on each rank.
        between_blocks: the generator for the dropouts after attention and MLP: ``sharded`` under sequence parallelism,
            where each rank has its own tokens there, else ``replicated``.
    """

    def __init__(self, seed: int, tp: TensorParallel, device: torch.device | str = "cpu"):
        device = "cpu" if torch.device(device).type == "meta" else device  # without values nothing is drawn
        # A hash, so that two seeds don't lead to the same stream.  The rank is added to it, not hashed: a CPU's
        # generator uses 32 bits, in which some of 8,192 hashes would be equal.
        first = child_seed(seed, "dropout")
        seeds = first, first + 1 + tp.rank
        self.replicated, self.sharded = (torch.Generator(device).manual_seed(stream_seed) for stream_seed in seeds)
        self.between_blocks = self.sharded if tp.sequence_parallel else self.replicated


#: How many forward passes a DropoutMask remembers whose backward may be still to come.
_REMEMBERED = 1024


class DropoutMask(nn.Module):
    """Dropout in two steps: draws a mask and saves it for backward now; ``Mask.apply`` applies it later.

    A layer draws the mask before the matmul to whose output it applies the mask. So the mask is saved before that
    matmul, and when a checkpoint runs the layer again, it can stop before the matmul.

    Args:
        p: the probability of a dropped element. It is rounded to a multiple of 1/65536, and the scale 1/(1−p) follows:
            on a CPU one 64-bit draw then decides four elements, which is several times faster than four draws.
        generator: the random-number generator from which to draw; None: torch's default generator.

    Args of ``forward``: ``like``, a tensor with the mask's shape and device, whose values aren't read; ``terms``, the
        NamedForward of the layer's forward pass, which says which tensors are not saved; ``term``, the mask's name in
        ``terms``. If that name is dropped, backward draws the mask again.
    Returns: a Mask.
    Saves: 1 byte an element. For p = 0 and after ``eval()`` it draws and saves nothing.
    Raises: ConfigError unless 0 <= p < 1, and on a GPU if a mask is dropped that came from torch's default generator.
        RuntimeError in backward, if a checkpoint runs this module again without restoring the generator's state.
    """

    def __init__(self, p: float, generator: torch.Generator | None):
        super().__init__()
        if type(p) not in (int, float) or not 0 <= p < 1:
            raise ConfigError("p", f"must be at least 0 and less than 1, got {shown(p)}")
        self.dropped_per_65536, self.generator = min(round(p * 2**16), 2**16 - 1), generator
        #: For each forward pass, whether it was in training, and its seed, or the digest of the generator's state.
        self._passes: deque[tuple[bool, int]] = deque(maxlen=_REMEMBERED)

    @stays_eager
    def forward(self, like: Tensor, terms: NamedForward = KEEP_ALL, term: str = "mask") -> Mask:
        if self.dropped_per_65536 == 0:
            return Mask(None, 1.0, None)
        on_cpu = like.device.type == "cpu"
        if self.generator is not None and not (on_cpu and self.training):
            self._check_second_run(digest_of(self.generator.get_state()))
        if not self.training:
            return Mask(None, 1.0, None)
        kept_share = 1 - self.dropped_per_65536 / 2**16
        if on_cpu:
            # A stream's state has 5,056 bytes here, a seed has 8.
            seed = fresh_seed(self.generator)
            self._check_second_run(seed)
            mask = terms(term, partial(_draw_on_cpu, like.shape, kept_share, seed))
        else:
            is_dropped = term in terms.dropped and term not in terms.stored
            if self.generator is None and is_dropped:
                raise ConfigError("generator", f"must be given to draw {term!r} again")
            draw = partial(_draw_in_one_pass, like.shape, like.device, kept_share)
            # A GPU's state has 16 bytes, on the host: reading them waits for nothing.
            state = self.generator.get_state().tolist() if self.generator and is_dropped else None
            mask = terms.add(term, draw(self.generator), partial(draw, None, state))
        return Mask(mask, 1 / kept_share, keep(mask) if torch.is_grad_enabled() else None)

    def _check_second_run(self, drawn_from: int) -> None:
        """Note a forward pass; in backward, raise RuntimeError unless a noted forward pass drew from the same state."""
        this = self.training, drawn_from
        if backward_pass() < 0:
            self._passes.append(this)
        elif this not in self._passes:
            raise other_numbers("dropout")


def _draw_on_cpu(shape: torch.Size, kept_share: float, seed: int) -> Tensor:
    count = shape.numel()
    draws = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu")
    draws.random_(-(2**63), None, generator=torch.Generator("cpu").manual_seed(seed))  # all 64 bits
    # In place, because torch has vector instructions for results of the operands' type, not for bools.
    kept = draws.view(torch.int16)[:count].ge_(2**15 - round(kept_share * 2**16))
    return kept.to(torch.bool).view(shape)


def _draw_in_one_pass(shape, device, kept_share: float, generator, state: list | None = None) -> Tensor:
    if state is not None and device.type != "meta":
        generator = torch.Generator(device)
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    # A GPU is limited by what it writes: 1 byte an element and no intermediate tensor.
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(kept_share, generator=generator)


class Mask:
    """A dropout mask that ``DropoutMask`` has drawn. ``apply`` applies it, once; then only the autograd graph holds it.

    Args:
        mask: bool, True for elements that stay; None: ``apply`` returns its input.
        scale: the factor 1/(1−p) for elements that stay.
        kept: the saved mask, for backward; None: it was drawn without autograd.
    """

    def __init__(self, mask: Tensor | None, scale: float, kept: Kept | None):
        self._mask, self._scale, self._kept, self._used = mask, scale, kept, False

    @stays_eager
    def apply(self, x: Tensor, terms: NamedForward = KEEP_ALL, term: str = "dropped") -> Tensor:
        """Return ``x`` with dropped elements set to 0 and all other elements scaled by 1/(1−p).

        Args:
            x: a tensor of the mask's shape.
            terms: the NamedForward of the layer's forward pass, which says which tensors are not saved.
            term: the result's name in ``terms``.

        Raises: RuntimeError when called a second time: draw another mask for another tensor.
        """
        if self._used:
            raise RuntimeError("apply: this mask has been used; draw one for each tensor that is dropped")
        mask, self._mask, self._used = self._mask, None, True
        if mask is None:
            return x
        if torch.is_grad_enabled() and not self._kept:  # drawn under no_grad
            self._kept = keep(mask)
        anchor = self._kept.anchor if self._kept and x.requires_grad else None
        dropped = _Drop.apply(x, mask, self._scale, self._kept, anchor)
        return terms.add(term, dropped, partial(_drop, scale=self._scale), x, mask)


class _Drop(Function):
    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, scale: float, kept: Kept | None, anchor: Tensor | None) -> Tensor:
        ctx.scale, ctx.kept = scale, kept
        return _drop(x, mask, scale)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (mask,) = ctx.kept.tensors()
        return _drop(grad, mask, ctx.scale), None, None, None, None


def _drop(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    if x.device.type == "cpu":
        # torch turns bytes into floats with vector instructions, bools one by one.
        return mask.view(torch.uint8).to(x.dtype).mul_(x).mul_(scale)
    # torch made this kernel for dropout's gradient, but forward computes the same product.
    return torch.ops.aten.native_dropout_backward(x, mask, scale)
