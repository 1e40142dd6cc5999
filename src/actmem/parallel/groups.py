"""The ranks that share one layer, as seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

#: How a layer can be shared: the arguments of ``tensor_parallel`` for each.
FORMS = {
    "tensor": {},
    "tensor+sequence": {"sequence_parallel": True},
    "tensor+sequence, plain": {"sequence_parallel": True, "keep_gathered_input": True},
}


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group: its process group, the number of ranks t, and this rank.

    sequence_parallel: layer norms, dropouts and residuals hold s/t tokens on each rank.
    keep_gathered_input: the plain form of sequence parallelism, which keeps the gathered
    input of every column-parallel linear for backward.  It exists for comparison.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    keep_gathered_input: bool = False


def tensor_parallel(
    group: dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    keep_gathered_input: bool = False,
) -> TensorParallel:
    """Describe ``group`` (default: all ranks) from this rank.  Needs an initialised process group."""
    group = group or dist.group.WORLD
    return TensorParallel(
        group, dist.get_world_size(group), dist.get_rank(group), sequence_parallel, keep_gathered_input
    )
