"""Parameters of parallel modules: initial values that don't depend on t, and marks of how a parameter is sharded.

**Initial values.**  The shards of t ranks are, bit for bit, the parts of the weight that one rank would have drawn, and
no rank ever makes the whole weight.  The unsharded weight is split, along the sharded dimension, into blocks of about a
million elements.  Each block has a random-number stream of its own, seeded by the weight's seed and the block's number.
A rank draws the blocks that overlap its shard and copies its part.  Blocks are drawn in float32 on the CPU, so the
values don't depend on device or dtype either.

**Seeds.**  A module gives each of its parts the seed ``child_seed(seed, name)``.  GPT names its layers by their number
in the whole model, so the result doesn't depend on pipeline stages either.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from actmem.config import ConfigError
from actmem.parallel.groups import TensorParallel

#: Elements drawn from one seed: 4 MiB of float32, the most that a rank holds beside its shard.
BLOCK_ELEMENTS = 2**20

STANDARD_DEVIATION = 0.02


def fresh_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed from a CPU generator, by default torch's own; ranks with equal generator states get equal seeds."""
    draw = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return int(draw.item()) if type(draw) is Tensor else 0  # a fake tensor has no value


def child_seed(seed: int, *name: str | int) -> int:
    """Return the seed for a module's part called ``name``: a hash of 56 bits of the module's seed and the name.

    So each part draws its own numbers, whatever else was drawn before. A CPU's generator uses 32 of the bits.

    Args:
        seed: the module's seed.
        name: the part's name, such as ``"qkv"``, or several words, such as ``"layers", 3``.
    """
    return int.from_bytes(hashlib.blake2b(repr((seed, *name)).encode(), digest_size=7).digest(), "big")


@torch.no_grad()
def draw_normal(parameter: nn.Parameter, tp: TensorParallel, seed: int | None) -> None:
    """Fill this rank's shard of a weight from a normal distribution with standard deviation 0.02.

    Megatron divides this deviation by sqrt(2L) for the last weight of attention and MLP. We don't: no byte or time
    depends on it. Fake and meta tensors have no values and stay as they are.

    Args:
        parameter: this rank's shard, with the attribute ``partition_dim``; or a replicated weight without it.
        tp: the ranks that share the weight.
        seed: the weight's seed, the same on all ranks; None draws one by ``fresh_seed``.
    """
    seed = fresh_seed() if seed is None else seed
    if parameter.is_meta or type(parameter.data) is not Tensor:
        return
    dim, (size, rank) = getattr(parameter, "partition_dim", None), part_of(parameter, tp)
    slices = parameter.detach().movedim(dim or 0, 0)
    start, stop = rank * len(slices), (rank + 1) * len(slices)
    slices_per_block = min(max(1, BLOCK_ELEMENTS // slices[0].numel()), size * len(slices))
    block = torch.empty(slices_per_block, *slices.shape[1:], dtype=torch.float32, device="cpu")
    generator = torch.Generator("cpu")
    for number in range(start // slices_per_block, -(-stop // slices_per_block)):
        block.normal_(std=STANDARD_DEVIATION, generator=generator.manual_seed(child_seed(seed, number)))
        offset = number * slices_per_block
        first, last = max(start, offset), min(stop, offset + slices_per_block)
        slices[first - start : last - start] = block[first - offset : last - offset]


class Part(NamedTuple):
    """How a tensor is sharded: into ``size`` shards, of which this rank holds number ``rank``, from 0."""

    size: int
    rank: int


def part_of(parameter: nn.Parameter, tp: TensorParallel) -> Part:
    """Return into how many shards a parameter is split, and which shard this rank holds.

    Args:
        parameter: a parameter with the marks of ``ParallelModule``.
        tp: the t ranks that share the parameter's module.

    Returns: ``Part(1, 0)`` for a replicated parameter; the parameter's own ``partition``, if it has one; else t shards.
    """
    if getattr(parameter, "partition_dim", None) is None:
        return Part(1, 0)
    return getattr(parameter, "partition", Part(tp.size, tp.rank))


_MARKS = ("partition_dim", "partition", "partial_gradient")


class ParallelModule(nn.Module):
    """A module whose parameters have attributes ("marks") that say how they are sharded over the ranks.

    ``partition_dim``: the dimension along which the parameter is sharded. ``partition``: a Part, if it is sharded into
    another number of shards than t. ``partial_gradient``: whether the gradient must be summed over the ranks.

    ``copy.deepcopy``, ``load_state_dict(assign=True)`` and ``to_empty`` make parameters without these attributes, so
    the module remembers the marks by name and sets them again. A parameter of another module, shared with this one,
    must have the same marks there.
    """

    _marks: dict[str, dict[str, Any]]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        marks = self.__dict__.setdefault("_marks", {})
        if param is not None:
            # Later parameters get the first one's marks.  One that has others is another module's, sharded in another
            # way; a tensor has one set of marks, so two such modules can't share it.
            own = {mark: value for mark, value in vars(param).items() if mark in _MARKS}
            first = marks.get(name) or own
            if own and own != first:
                raise ConfigError(name, f"is another module's, with marks {own} for {first} here: give a copy of it")
            marks[name] = first
        super().register_parameter(name, param)
        self._mark_again()

    def constants(self, device: torch.device | str | None) -> dict[str, Tensor]:
        """Make the buffers that are in no state dict, such as a mask or rotary tables.

        The module calls this after ``to_empty``, or when it is moved to another device or dtype. A subclass with such
        buffers overrides it; this class has none.

        Args:
            device: the device on which to make the buffers; None: the CPU.

        Returns: each buffer's value, by the buffer's name.
        """
        return {}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark_again()

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        self._mark_again()
        for name, new in self._buffers.items():
            # ``to_empty`` gives it no values, and ``bfloat16()`` rounds tables that are float32 in every model.
            if new is not None and new is not before[name]:
                with torch.device(new.device):
                    self._buffers[name] = self.constants(new.device).get(name, new)
        return self

    def _mark_again(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not None:
                vars(parameter).update(self._marks[name])


def own_weight(
    tp: TensorParallel, seed: int | None, *sizes: int, dim: int | None = None, part: Part | None = None, **factory
) -> nn.Parameter:
    """Make this rank's shard of a weight, and fill it from a normal distribution (``draw_normal``).

    Args:
        tp: the ranks that share the weight.
        seed: the weight's seed, the same on all ranks; None draws one from torch's CPU generator.
        sizes: the shard's shape, such as ``v/t, h``.
        dim: the dimension along which the weight is sharded. None: every rank has all of it, and under sequence
            parallelism its gradient must be summed over the ranks.
        part: the number of shards and the number of this rank's shard, if there are not t shards; None: t shards.
        factory: dtype and device of the weight.
    """
    parameter: Any = nn.Parameter(torch.empty(*sizes, **factory))
    if dim is None:
        mark_partial_gradient(parameter, tp)
    else:
        parameter.partition_dim = dim
    if part is not None:
        parameter.partition = part
    draw_normal(parameter, tp, seed)
    return parameter


def mark_partial_gradient(parameter: nn.Parameter, tp: TensorParallel) -> nn.Parameter:
    """Set ``partial_gradient`` on a replicated parameter: True under sequence parallelism, else False.

    Under sequence parallelism norms, the biases of row-parallel linears and the position table see only s/t tokens on
    each rank, so their gradients must be summed over the ranks. Call this before the parameter is registered in its
    module.

    Args:
        parameter: a parameter of which every rank holds the whole.
        tp: the ranks that share the parameter's module.

    Returns: the parameter.
    """
    parameter.partial_gradient = tp.sequence_parallel  # type: ignore[attr-defined]
    return parameter
