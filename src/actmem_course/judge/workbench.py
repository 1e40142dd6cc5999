"""What a check has in its hands: the learner's functions, the ranks, and random tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actmem_course.judge.verdict import Wrong
from actmem_course.judge.watch import JUDGING, InStep, Place, Step, watching
from actmem_course.rank_store import RankStore


class Bench:
    """One rank's side of the judging.

    rank, size, group, device: as the learner's functions see them.  functions: the names of the
    learner's file.  Random tensors depend only on the seed and the group, so each rank knows what
    the others of its group hold and expected values need no exchange.
    """

    def __init__(self, functions: dict, store: RankStore, device: str = "cpu"):
        self.functions, self.store, self.device = functions, store, device
        self.rank, self.size = store.rank, store.size
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.place = Place(file=functions.get("__file__", ""))
        self.in_step = InStep(store, self.place)
        #: Called by long checks to say that they move on, and what they do; the command line listens.
        self.progress: Callable[..., None] = lambda text="": None
        #: The ranks of ``group``, in its order, as numbers among all ranks; "" or a name for them.
        self.members, self.group_name = list(range(self.size)), ""

    def start(self) -> None:
        """Begin to judge an exercise; ranks are in step from here on."""
        self.in_step = InStep(self.store, self.place)

    def __getitem__(self, name: str):
        """The learner's function of that name."""
        if not callable(self.functions.get(name)):
            raise Wrong(f"the file no longer has a function {name}")
        return self.functions[name]

    def subgroups(self) -> Iterator[Bench]:
        """This bench on groups that are not all ranks in their order: whoever forgets ``group`` shows there.

        All ranks, the last first; then groups of every second rank, the last first, or of one rank each.
        """
        world = self.size
        if world == 1 or self.members != list(range(world)):
            return
        step = world // 2 if world % 2 == 0 and world > 2 else world
        halves = [list(range(first, world, step))[::-1] for first in range(step)]
        for name, partition in (
            ("the ranks in another order", [list(range(world))[::-1]]),
            (f"{len(halves[0])} of {world} ranks" if step < world else "one rank alone", halves),
        ):
            groups = self.store.kept.get(name) or [_new_group(members) for members in partition]
            self.store.kept[name] = groups
            which = next(i for i, members in enumerate(partition) if self.rank in members)
            other = copy.copy(self)
            other.group, other.members, other.group_name = groups[which], partition[which], name
            other.size, other.rank = len(other.members), dist.get_rank(groups[which])
            other.members = dist.get_process_group_ranks(groups[which])
            yield other

    def watching(self) -> watching:
        """Run the learner's code in this: collectives are counted, and ranks kept in step."""
        return watching(self.in_step, self.members if self.group_name else None)

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank, while a check runs; ends the check if another rank has ended its own."""
        values = self.in_step.step(Step(JUDGING), value)
        return [values[member] for member in self.members]

    def random(self, *sizes: int, seed: int = 0) -> Tensor:
        """Normal float64 numbers, the same on every rank of the group."""
        salt = 10**6 * (1 + min(self.members)) if self.group_name else 0
        generator = torch.Generator().manual_seed(seed + salt)
        return torch.randn(sizes, dtype=torch.float64, generator=generator).to(self.device)

    def random_by_rank(self, *sizes: int, seed: int = 0) -> list[Tensor]:
        """One tensor for each rank; each rank knows all of them."""
        return [self.random(*sizes, seed=1000 * (rank + 1) + seed) for rank in range(self.size)]

    def shards(self, full: Tensor, dim: int = 0) -> list[Tensor]:
        """Equal parts of a tensor, one for each rank."""
        return [part.contiguous() for part in full.chunk(self.size, dim)]


def _new_group(members: list[int]) -> dist.ProcessGroup:
    # torch before 2.10 always sorts a group's ranks.
    unsorted: dict[str, Any] = (
        {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    )
    return dist.new_group(members, **unsorted)


@contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Raise Wrong if the block writes to one of the tensors."""
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if not torch.equal(tensor.detach(), before[name]):
            raise Wrong(f"{name} is changed in place: it belongs to the caller, so work on a copy")
