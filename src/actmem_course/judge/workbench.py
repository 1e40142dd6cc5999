"""What a check has in its hands: the learner's functions, the ranks, and random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from actmem_course.judge.verdict import Wrong
from actmem_course.judge.watch import JUDGING, InStep, Place, Step, watching
from actmem_course.rank_store import RankStore


class Bench:
    """One rank's side of the judging.

    rank, size, group, device: as the learner's functions see them.  functions: the names of the
    learner's file.  alone: a group of this rank only.  Random tensors depend only on the seed,
    so each rank knows what the others hold and expected values need no exchange.
    """

    def __init__(self, functions: dict, store: RankStore, device: str = "cpu"):
        self.functions, self.store, self.device = functions, store, device
        self.rank, self.size = store.rank, store.size
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.place = Place(file=functions.get("__file__", ""))
        self.in_step = InStep(store, self.place)
        #: Called by long checks to say that they move on, and what they do; the command line listens.
        self.progress: Callable[..., None] = lambda text="": None
        self._alone: dist.ProcessGroup | None = None

    def start(self, exercise: str) -> None:
        """Begin to judge an exercise; ranks are in step from here on."""
        self.place.exercise = exercise
        self.in_step = InStep(self.store, self.place)

    def __getitem__(self, name: str):
        """The learner's function of that name."""
        if not callable(self.functions.get(name)):
            raise Wrong(f"the file no longer has a function {name}")
        return self.functions[name]

    @property
    def alone(self) -> dist.ProcessGroup | None:
        """A group of this rank only, to see whether a function exchanges with the group it is given."""
        if self._alone is None and self.size > 1:
            self._alone = [dist.new_group([rank]) for rank in range(self.size)][self.rank]
        return self._alone or self.group

    def watching(self) -> watching:
        """Run the learner's code in this: collectives are counted, and ranks kept in step."""
        return watching(self.in_step)

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank, while a check runs; ends the check if another rank has ended its own."""
        return self.in_step.step(Step(JUDGING), value)

    def random(self, *sizes: int, seed: int = 0) -> Tensor:
        """Normal float64 numbers, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sizes, dtype=torch.float64, generator=generator).to(self.device)

    def random_by_rank(self, *sizes: int, seed: int = 0) -> list[Tensor]:
        """One tensor for each rank; each rank knows all of them."""
        return [self.random(*sizes, seed=1000 * (rank + 1) + seed) for rank in range(self.size)]

    def shards(self, full: Tensor, dim: int = 0) -> list[Tensor]:
        """Equal parts of a tensor, one for each rank."""
        return [part.contiguous() for part in full.chunk(self.size, dim)]


@contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Raise Wrong if the block writes to one of the tensors."""
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if not torch.equal(tensor.detach(), before[name]):
            raise Wrong(f"{name} is changed in place: it belongs to the caller, so work on a copy")
