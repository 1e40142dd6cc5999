"""Every collective is announced before it starts, so that a mismatch is a sentence and not a hang.

Before a collective of the learner runs, each rank says which it is about to run and hears what
the others say.  If all say the same, it runs.  If not, it runs on no rank, and every rank raises
the same OutOfStep: the group stays whole, and judging can go on.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.measure.comms import Collective, count_collectives, kind_of
from actmem.torch_private import tree_leaves
from actmem_course.judge.verdict import OtherGroup, OutOfStep, PeerStopped
from actmem_course.messages import message
from actmem_course.rank_store import RankStore

#: Between two ranks only: others need not take part.
_PAIRWISE = ("send", "receive")
#: Collectives of lists of shards, and which argument the list is.
_LISTS = {"allgather_": 0, "reduce_scatter_": 1}


@dataclass
class Place:
    """Where this rank is in the learner's file.

    on_collective: called when this rank begins to wait in a collective of a kind, and with "" when it is through.
    """

    file: str = ""
    on_collective: Callable[[str], None] = lambda kind: None

    def line(self, frame: FrameType | None = None) -> str:
        """File, line and function of the learner's innermost frame; "" outside the learner's file."""
        frame = frame or sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return f"{os.path.basename(self.file)}:{frame.f_lineno}, in {frame.f_code.co_name}"
            frame = frame.f_back
        return ""


@message
@dataclass(frozen=True)
class Step:
    """What a rank is about to do: a collective, or nothing more (``returned``, ``stopped``)."""

    do: str
    elements: int = 0
    dtype: str = ""
    where: str = ""

    def matches(self, other: Step) -> bool:
        """Whether two ranks that do these meet."""
        return (self.do, self.elements, self.dtype) == (other.do, other.elements, other.dtype)

    def text(self, ranks: list[int]) -> str:
        """What these ranks do, in words."""
        line = self.where.split(",")[0]
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        if self.do == "returned":
            return f"{who} {'have' if len(ranks) > 1 else 'has'} returned"
        return f"{who} {'are' if len(ranks) > 1 else 'is'} waiting in {self.do}" + (f" ({line})" if line else "")


RETURNED, JUDGING, STOPPED = "returned", "judging", "stopped"


class InStep:
    """Keeps the ranks in step while one exercise is judged."""

    _serials = itertools.count()

    def __init__(self, store: RankStore, place: Place):
        self._store, self.place = store, place
        self._key, self._count = f"step/{next(self._serials)}", 0

    def step(self, step: Step, value: object = None) -> list:
        """Tell ``step`` and hear the others'; every rank's ``value``.

        Raises OutOfStep or PeerStopped if the ranks do different things.
        """
        if self._store.size == 1:
            return [value]
        self._count += 1
        quiet = step.do in (RETURNED, JUDGING)
        if not quiet:
            self.place.on_collective(step.do)
        said = self._store.exchange(f"{self._key}/{self._count}", (step, value))
        if not quiet:
            self.place.on_collective("")
        steps = [other for other, _ in said]
        if any(other.do == STOPPED for other in steps):
            raise PeerStopped
        if not all(step.matches(other) for other in steps):
            raise OutOfStep(_mismatch(steps))
        return [value for _, value in said]

    def stop(self) -> None:
        """Say that this rank judges no further; it waits for nobody."""
        self._store.post(f"{self._key}/{self._count + 1}", (Step(STOPPED), None))


def _mismatch(steps: list[Step]) -> str:
    if len({step.do for step in steps}) == 1:
        sizes = "; ".join(
            f"rank {rank} hands it {step.elements:,} elements of {step.dtype}" for rank, step in enumerate(steps)
        )
        return f"the ranks meet in {steps[0].do} with tensors that do not fit: {sizes} ({steps[0].where})"
    same: dict[tuple[str, str], list[int]] = {}
    for rank, step in enumerate(steps):
        same.setdefault((step.do, step.where), []).append(rank)
    parts = [steps[ranks[0]].text(ranks) for ranks in same.values()]
    return "deadlock: " + "; ".join(parts)


#: Functions of torch.distributed that give a handle with async_op=True.
_ASYNC = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "reduce", "broadcast", "all_to_all", "all_to_all_single",
)  # fmt: skip


class Handle:
    """A handle of torch's that says when it is waited for."""

    def __init__(self, work: dist.Work, on_wait):
        self._work, self._on_wait = work, on_wait

    def wait(self, *args, **kwargs):
        self._on_wait()
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


class watching(count_collectives):
    """Counts collectives as ``count_collectives`` does, and announces each before it runs."""

    def __init__(self, in_step: InStep, members: list[int] | None = None):
        super().__init__()
        self._in_step, self._members = in_step, members
        #: Collectives whose handles nobody has waited for.
        self.unwaited: list[str] = []
        #: Where a collective ran on a tensor that autograd was following.
        self.unrecorded = ""

    def __enter__(self):
        self._before = {name: getattr(dist, name) for name in _ASYNC if hasattr(dist, name)}
        for name, function in self._before.items():
            setattr(dist, name, self._noting_handles(name, function))
        return super().__enter__()

    def _noting_handles(self, name: str, function):
        @wraps(function)
        def noting(*args, **kwargs):
            work = function(*args, **kwargs)
            if not hasattr(work, "wait"):
                return work
            said = f"dist.{name} ({self._in_step.place.line(sys._getframe(1)).split(',')[0]})"
            self.unwaited.append(said)
            return Handle(work, lambda: self.unwaited.remove(said) if said in self.unwaited else None)

        return noting

    def __exit__(self, kind, error, trace):
        for name, function in self._before.items():
            setattr(dist, name, function)
        super().__exit__(kind, error, trace)
        if error is None:
            self._in_step.step(Step(RETURNED))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):  # by name: loading the class takes a second
            return NotImplemented  # DTensor turns into plain collectives first
        kind = kind_of(func).replace("-", "_")
        if kind and kind not in _PAIRWISE:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            largest = max(tensors, key=Tensor.numel, default=None)
            elements, dtype = (
                (0, "") if largest is None else (largest.numel(), str(largest.dtype).removeprefix("torch."))
            )
            where = self._in_step.place.line(sys._getframe(1))
            if self._members is not None:
                self._check_group(kind, tree_leaves((args, kwargs)), where)
            if func.name().startswith("c10d::") and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                self.unrecorded = self.unrecorded or f"{kind} ({where.split(',')[0]})"
            self._in_step.step(Step(kind, elements, dtype, where))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().split(".")[0].split("::")[1]
        if kind and name in _LISTS:
            # The whole tensor comes as a list of shards, of which the count sees the largest.
            shards = [t for t in tree_leaves(args[_LISTS[name]]) if isinstance(t, Tensor)]
            self.collectives[-1] = Collective(
                self.collectives[-1].kind, sum(t.numel() * t.element_size() for t in shards)
            )
        return result

    def _check_group(self, kind: str, arguments: list, where: str) -> None:
        """Raise OtherGroup, before the collective runs, if it is among others than the ranks of the bench's group."""
        for argument in arguments:
            ranks = self._members
            if isinstance(argument, torch.ScriptObject):
                with suppress(RuntimeError, TypeError):  # a reduction's kind is one as well
                    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
            elif dist.group.WORLD is not None and argument == dist.group.WORLD.group_name:  # functional collectives
                ranks = list(range(dist.get_world_size()))
            if ranks != self._members:
                raise OtherGroup(kind, where)
