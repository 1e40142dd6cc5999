"""Which dropout draws must agree between ranks, and dropout that draws its mask early.

A tensor that every rank holds whole must be dropped alike on every rank, or the replicas
drift apart.  A tensor that the ranks share must be dropped differently, or every shard
repeats one pattern.  So each rank has two streams of random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import ConfigError
from actmem.keep import Kept, keep
from actmem.parallel.groups import TensorParallel


class DropoutStreams:
    """Two random-number generators on one device.

    replicated: the same on all ranks of the group.  sharded: another one on each rank.
    """

    #: Distance between the seeds of neighbouring ranks' sharded streams; the replicated
    #: stream uses the seed itself.
    RANK_STRIDE = 1009

    def __init__(self, seed: int, tp: TensorParallel, device: torch.device | str = "cpu"):
        self.replicated = torch.Generator(device)
        self.sharded = torch.Generator(device)
        self.replicated.manual_seed(seed)
        self.sharded.manual_seed(seed + self.RANK_STRIDE * (tp.rank + 1))


class DropoutMask(nn.Module):
    """Draws and keeps a dropout mask; ``Mask.drop`` applies it later.

    Drawing apart from dropping lets a layer draw the mask before the matrix product whose
    output it drops.  A checkpoint then finds everything that backward reads before that
    product, and leaves the product out of its second run.

    In: a tensor of the mask's shape (only shape and device are read).  Keeps 1 byte an
    element; nothing for p = 0.  p is rounded to 1/65536 (and the scale to match): one 64-bit draw
    then makes four decisions, several times faster on a CPU than a draw for each.
    """

    def __init__(self, p: float, generator: torch.Generator):
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError("p", f"must be at least 0 and less than 1, got {p}")
        self.num_dropped, self.generator = min(round(p * 2**16), 2**16 - 1), generator

    def forward(self, like: Tensor) -> Mask:
        if self.num_dropped == 0:
            return Mask(None, 1.0, None)
        count = like.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device)
        draws.random_(-(2**63), None, generator=self.generator)  # all 64 bits
        mask = _at_least(draws.view(torch.int16)[:count], self.num_dropped - 2**15).view(like.shape)
        scale = 2**16 / (2**16 - self.num_dropped)
        return Mask(mask, scale, keep(mask) if torch.is_grad_enabled() else None)


def _at_least(draws: Tensor, limit: int) -> Tensor:
    """``draws >= limit``; may write over ``draws``."""
    if draws.device.type == "cpu":
        # torch has vector instructions for results of the operands' type, not for bools.
        return draws.ge_(limit).to(torch.bool)
    return draws >= limit


class Mask:
    """A drawn mask.  It lives in autograd's hands after ``drop``, not in this object's."""

    def __init__(self, mask: Tensor | None, scale: float, kept: Kept | None):
        self._mask, self._scale, self._kept = mask, scale, kept

    def drop(self, x: Tensor) -> Tensor:
        """``x`` with the unmasked elements set to 0 and the others scaled by 1/(1−p)."""
        mask, self._mask = self._mask, None
        if mask is None:
            return x
        return _Drop.apply(x, mask, self._scale, self._kept, self._kept.anchor if self._kept and x.requires_grad else None)


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
    # Written for gradients, but it is the same product, in a single kernel.
    return torch.ops.aten.native_dropout_backward(x, mask, scale)
