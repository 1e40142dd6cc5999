"""What a check has in its hands: the learner's functions, the ranks, and random tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actmem_course.judge.verdict import Wrong
from actmem_course.judge.virtual import Watch


class Bench:
    """One rank's side of the judging.

    Args:
        functions: the names of the learner's file.
        side: the rank, virtual or real.
        subgroup: its name, if the functions are not given all ranks in their order.
        progress: called by long checks to say that they move on, and what they do.

    Attributes:
        rank, t, group, device: as the learner's functions see them.
        members: the ranks of ``group``, in its order, as numbers among all ranks.
        group_name: "" or a name for them.

    Random tensors depend only on the seed and the group, so each rank knows what the others of its group hold and
    expected values need no collective.
    """

    def __init__(
        self,
        functions: dict,
        side: Any,
        subgroup: str = "",
        progress: Callable[..., None] = lambda text="": None,
        device: str = "cpu",
    ):
        self.functions, self.side, self.device, self.progress = functions, side, device, progress
        self.rank, self.t, self.members, self.group_name = side.number, side.size, list(range(side.size)), ""
        self.group = dist.group.WORLD if dist.is_initialized() else None
        if subgroup:
            self._join(subgroup)

    def _join(self, name: str) -> None:
        """Be on a group that is not all ranks in their order: whoever forgets ``group`` shows there."""
        world = self.t
        step = world // 2 if world % 2 == 0 and world > 2 else 1
        made = [list(range(first, world, step))[::-1] for first in range(step)]
        groups = [dist.new_group(members, **_UNSORTED) for members in made]
        self.group = next(group for members, group in zip(made, groups) if self.rank in members)
        self.members, self.group_name = dist.get_process_group_ranks(self.group), name
        self.t, self.rank = len(self.members), dist.get_rank(self.group)

    def __getitem__(self, name: str):
        """The learner's function of that name."""
        if not callable(self.functions.get(name)):
            raise Wrong(f"the file no longer has a function {name}")
        return self.functions[name]

    def watching(self) -> AbstractContextManager[Watch]:
        """Run the learner's code in this: its collectives are noted, and all ranks wait for each other at its end."""
        return self.side.watching(self.members if self.group_name else None)

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank, while a check runs; ends the check if another rank has ended its own."""
        values = self.side.gather(value)
        return [values[member] for member in self.members]

    def random(self, *sizes: int, seed: int = 0) -> Tensor:
        """Normal float64 numbers, the same on every rank of the group."""
        salt = 10**6 * (1 + min(self.members)) if self.group_name else 0
        generator = torch.Generator().manual_seed(seed + salt)
        return torch.randn(sizes, dtype=torch.float64, generator=generator).to(self.device)

    def seed(self, seed: int) -> None:
        """Seed the default generators.  torch.manual_seed does it for every kind of device, and takes 2 ms."""
        torch.default_generator.manual_seed(seed)
        if self.device == "cuda":
            torch.cuda.manual_seed(seed)

    def shards(self, full: Tensor, dim: int = 0) -> list[Tensor]:
        """Equal parts of a tensor, one for each rank."""
        return [part.contiguous() for part in full.chunk(self.t, dim)]


def name_of_subgroup(world: int) -> str:
    """What to call every second rank, the last first; where these are none or one, all ranks, the last first."""
    return f"2 of {world} ranks" if world % 2 == 0 and world > 2 else "the ranks in another order"


#: torch before 2.10 always sorts a group's ranks.
_UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)
