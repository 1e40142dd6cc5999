"""What a check has in its hands: the learner's functions, the ranks, and random tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.ledger.comms import count_collectives
from actmem.torch_private import no_dispatch_modes
from actmem_course.judge.verdict import Wrong
from actmem_course.rank_store import RankStore


class Bench:
    """One rank's side of the judging.

    side: the rank, a ``virtual.VirtualRank`` or a ``RealRank``.  rank, size, group, device: as the learner's functions
    see them.  functions: the names of the
    learner's file.  Random tensors depend only on the seed and the group, so each rank knows what
    the others of its group hold and expected values need no collective.  progress: called by long
    checks to say that they move on, and what they do.
    """

    def __init__(
        self, functions: dict, side: Any, device: str = "cpu", progress: Callable[..., None] = lambda text="": None
    ):
        self.functions, self.side, self.device, self.progress = functions, side, device, progress
        self.rank, self.size = side.number, side.size
        self.group = dist.group.WORLD if dist.is_initialized() else None
        #: The ranks of ``group``, in its order, as numbers among all ranks; "" or a name for them.
        self.members, self.group_name = list(range(self.size)), ""

    def __getitem__(self, name: str):
        """The learner's function of that name."""
        if not callable(self.functions.get(name)):
            raise Wrong(f"the file no longer has a function {name}")
        return self.functions[name]

    def with_functions(self, functions: dict) -> Bench:
        """This bench with another file's functions."""
        other = copy.copy(self)
        other.functions = functions
        return other

    def subgroups(self) -> Iterator[Bench]:
        """This bench on groups that are not all ranks in their order: whoever forgets ``group`` shows there.

        All ranks, the last first; then groups of every second rank, the last first, or of one rank each.
        """
        world = self.size
        if world == 1 or self.members != list(range(world)):
            return
        step = world // 2 if world % 2 == 0 and world > 2 else world
        halves = [list(range(first, world, step))[::-1] for first in range(step)]
        for name, partition in zip(names_of_subgroups(world), ([list(range(world))[::-1]], halves)):
            made = [(members, dist.new_group(members, **_UNSORTED)) for members in partition]
            other = copy.copy(self)
            other.group = next(group for members, group in made if self.rank in members)
            other.size, other.rank, other.group_name = len(partition[0]), dist.get_rank(other.group), name
            other.members = dist.get_process_group_ranks(other.group)
            yield other

    def watching(self) -> AbstractContextManager[Any]:
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
        return [part.contiguous() for part in full.chunk(self.size, dim)]


def names_of_subgroups(world: int) -> tuple[str, str]:
    """What to call them."""
    return "the ranks in another order", f"2 of {world} ranks" if world % 2 == 0 and world > 2 else "one rank alone"


#: torch before 2.10 always sorts a group's ranks.
_UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)


def check_unwritten(given: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Raise Wrong if a tensor differs from its copy.  given: a name, the tensor and the copy."""
    with no_dispatch_modes():
        for name, tensor, before in given:
            if not torch.equal(tensor.detach(), before):
                raise Wrong(f"{name} is changed in place", "work on a copy", "it belongs to the caller")


class RealRank:
    """This process among those of its group (gloo or NCCL)."""

    def __init__(self, store: RankStore):
        self.store, self.number, self.size = store, store.rank, store.size

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank."""
        return self.store.gather(value)

    def calling(self) -> None:
        """The case calls a function of the file, which nobody here counts."""

    @contextmanager
    def watching(self, expected: list[int] | None = None) -> Iterator[count_collectives]:
        """Counts; what must be found out about a learner's collectives, virtual ranks have found out."""
        with count_collectives() as seen:
            seen.unwaited, seen.unrecorded, seen.groups = [], "", 0
            yield seen
