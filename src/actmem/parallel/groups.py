"""The ranks that share one layer, as seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from actmem.config import ConfigError, check_size


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group: its process group, the number of ranks t, and this rank.

    A module that holds one can't be pickled, because a process group can't: save ``module.state_dict()``. A deep copy
    of the module uses the same process group.

    Args:
        group: the process group; None: all ranks.
        size: t.
        rank: this rank's number in the group, from 0.
        sequence_parallel: True if layer norms, dropouts and residuals work on s/t tokens on each rank.
        keep_gathered_input: the plain form of sequence parallelism, for comparison, which saves the gathered input of
            every column-parallel linear.

    Raises: ConfigError unless ``rank`` is from 0 to size − 1.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    keep_gathered_input: bool = False

    def __post_init__(self) -> None:
        check_size("size", self.size)
        check_size("rank", self.rank, largest=self.size - 1, least=0)

    @property
    def sequence_parts(self) -> int:
        """Number of shards of the sequence outside attention and MLP: t under sequence parallelism, else 1."""
        return self.size if self.sequence_parallel else 1

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        return self  # frozen, and a process group has no copies


def tensor_parallel(
    group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False, keep_gathered_input: bool = False
) -> TensorParallel:
    """Make the TensorParallel of a process group, with this rank's number in it.

    ``torch.distributed`` must be initialised.

    Args:
        group: a process group that contains this rank; None: all ranks.
        sequence_parallel: True if layer norms, dropouts and residuals work on s/t tokens on each rank.
        keep_gathered_input: True for the plain form of sequence parallelism, which saves the gathered input of every
            column-parallel linear.

    Raises: ConfigError if this rank is not in the group.
    """
    group = group or dist.group.WORLD
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ConfigError("group", f"rank {dist.get_rank()} is not in it")
    return TensorParallel(group, size, rank, sequence_parallel, keep_gathered_input)
