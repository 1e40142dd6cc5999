"""Virtual ranks: threads of one process that take turns, with collectives that copy tensors between them.

Each thread has its own process groups, so torch.distributed, functional collectives and DTensor work unmodified.  A
rank runs until it has to wait in a collective for another rank; then the next rank runs.  So a run is deterministic,
and nothing hangs: if the ranks' collectives don't match, or if all ranks wait, the judge reports it at once.

Every run has new threads, so settings of a thread that a learner's code changes (grad mode, default group, autocast)
end with the run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.ledger.comms import Collective
from actmem.torch_private import no_dispatch_modes
from actmem_course.judge.meeting import RETURNED, Meeting, deadlock, name_of, reduced
from actmem_course.judge.torch_private import name_of_group, world_of_each_thread
from actmem_course.judge.verdict import OtherGroup, OutOfStep, PeerStopped, Wrong

_local, _DEFAULT = threading.local(), torch.default_generator


def rank_of_this_thread() -> int:
    """Return the number of the virtual rank that runs in this thread; 0 if none does."""
    rank = getattr(_local, "rank", None)
    return rank.number if rank else 0


def file_and_line(frame: FrameType) -> str:
    """Return the file name and the line that a Python frame is executing: "lab2.py:30".

    Some bytecode instructions, such as the jump of a loop, have no line; the line before is returned for them.
    """
    line = frame.f_lineno
    if line is None:
        lines = [(start, line) for start, _, line in frame.f_code.co_lines() if line and start <= frame.f_lasti]
        line = lines[-1][1] if lines else frame.f_code.co_firstlineno
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


def innermost(file: str, frame: FrameType | None) -> FrameType | None:
    """Find the innermost frame of a call stack whose code is in ``file``.

    Args:
        file: the path of a Python file.
        frame: the frame from which to search outwards; None for an empty stack.

    Returns: the frame found; None if no frame runs code of ``file``, as in the backward pass of torch's own operators.
    """
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame


def line_in(file: str) -> str:
    """Return the line of a file that this thread is executing: "lab2.py:30".

    Args:
        file: the path of the file.

    Returns: the file's name and the line; "" if no frame of this thread's stack runs code of ``file``.
    """
    frame = innermost(file, sys._getframe(1))
    return file_and_line(frame) if frame else ""


def _locked() -> threading.Lock:
    """Make a locked lock, which another thread releases.  It is faster than a semaphore, which is written in Python."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class VirtualWork(dist.Work):
    """The handle of a collective (``async_op=True`` returns it).  ``wait()`` copies the results to the output tensors.

    Args:
        rank: the rank that started the collective.
        meeting: the collective, with the calls of all ranks.
        place: the index of this rank's output in ``meeting.made``.
        outputs: the tensors to which the results are copied.
        kind: the collective, such as "all_reduce".
        line: the line of the learner's file that started it, or "".
    """

    def __init__(self, rank: VirtualRank, meeting: Meeting, place: int, outputs: list[Tensor], kind: str, line: str):
        super().__init__()
        self._rank, self._meeting, self._place, self._outputs = rank, meeting, place, outputs
        self.kind, self.line, self.over = kind, line, False
        if rank.plain:  # torch itself waits for functional collectives, when their result is read
            rank.unwaited.append(self)

    def wait(self, timeout=None) -> bool:
        """Let the other ranks run until all ranks of the group have called the collective, then copy the results.

        Args:
            timeout: not used: virtual ranks that wait for ever are found at once.

        Returns: True.
        """
        if not self.over:
            self.over = True
            self._rank.unwaited = [work for work in self._rank.unwaited if work is not self]
            self._rank.wait_for(self._meeting, self.kind, self.line)
            with torch.no_grad(), no_dispatch_modes():
                for out, value in zip(self._outputs, self._meeting.made[self._place]):  # type: ignore[index]
                    if value is not None:
                        out.detach().copy_(value.view(out.shape))
        return True

    def is_completed(self) -> bool:
        """Return whether all ranks have called the collective."""
        return self._meeting.over

    def get_future(self):
        """Wait, and return a finished future with the output tensors."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


#: Collectives that treat each element by itself, so that any order of the elements in memory is right.
_BY_ELEMENT = ("all_reduce", "broadcast", "reduce")
#: Collectives that write to a tensor's memory in the order of what they read.
_INTO_MEMORY = ("all_to_all", "scatter")


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor's elements lie next to each other in memory, in any order."""
    return x.numel() == 0 or 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) == x.numel()


def check_contiguous(kind: str, line: str, tensors: list[Tensor]) -> None:
    """Raise Wrong if a collective gets a tensor that isn't contiguous, where real backends need a contiguous one.

    Args:
        kind: the collective, such as "all_reduce".
        line: the line of the learner's file that calls it, or "".
        tensors: the tensors to check: the collective's inputs, and for some collectives its outputs.
    """
    if not all(map(_is_dense if kind in _BY_ELEMENT else Tensor.is_contiguous, tensors)):
        call = f"{kind} ({line})" if line else f"{kind}, which torch's own backward calls,"
        raise Wrong(
            f"{call} is given a tensor that is not contiguous",
            "give it x.contiguous(), or a copy, and use that; in torch's backward, write your own Function",
            "a collective takes a tensor's elements as they lie in memory",
        )


def _same_for_all(combine: Callable[[list[Tensor]], Tensor]) -> Callable[[list], list]:
    """Make the ``Meeting.make`` of a collective after which every rank has the same.

    Args:
        combine: makes one tensor out of one tensor of each rank.
    """
    return lambda everyone: [[combine(list(of_ranks)) for of_ranks in zip(*everyone)]] * len(everyone)


class Group(dist.ProcessGroup):
    """A process group of virtual ranks: torch's collectives call its methods.

    Args:
        rank: this rank's number in the group.
        size: how many ranks the group has.
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._count = rank, size, 0
        self._known: tuple[str, list[VirtualRank]] | None = None

    def __repr__(self) -> str:
        return "group"  # in a message: without an address

    def size(self):
        return self._size

    def getBackendName(self):
        return "virtual"

    @property
    def group_name(self):
        return name_of_group(self)

    pg_name = group_name

    def _meet(
        self, kind: str, tensors: list[Tensor], outputs: list[Tensor], make, more: tuple = (), sized=None
    ) -> VirtualWork:
        """Start a collective: come to the meeting of the group's ranks for it.

        Args:
            kind: the collective, as "all_reduce".
            tensors: what this rank brings.
            outputs: the tensors that its results are copied into.
            make: see ``Meeting.make``.
            more: further arguments that must be the same on all ranks.
            sized: the tensors whose number of elements must be the same on all ranks, if that isn't so for
                ``tensors`` and ``outputs``.
        """
        me: VirtualRank = _local.rank
        line = line_in(me.file)
        if self._known is None:  # only after the group is made does torch know its name and its ranks
            self._known = self.group_name, [me.ranks.members[k] for k in dist.get_process_group_ranks(self)]
        name, members = self._known
        numbers = [member.number for member in members]
        me.note(kind, line, tensors, outputs, numbers)
        self._count += 1
        both = [tensors, outputs] if sized is None else [sized]
        largest = max(sum(both, []), key=Tensor.numel, default=None)
        elements = max(sum(x.numel() for x in xs) for xs in both)
        dtype = "" if largest is None else str(largest.dtype).removeprefix("torch.")
        key = name, tuple(numbers), self._count
        meeting = me.ranks.meetings.setdefault(key, Meeting(self._size, make))
        with no_dispatch_modes():
            brought = [x.detach().clone() for x in tensors]
        meeting.join(self._rank, (kind, elements, dtype, more, line), brought, numbers)
        return VirtualWork(me, meeting, self._rank, outputs, kind, line)

    def allreduce(self, tensors, opts=None):  # type: ignore[override]
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self._meet("all_reduce", tensors, tensors, _same_for_all(lambda of: reduced(of, op)), (name_of(op),))

    def allgather(self, outputs, tensors, opts=None):
        return self._meet("all_gather", tensors, outputs[0], lambda all_: [[own[0] for own in all_]] * len(all_))

    def all_gather_single(self, output, tensor, opts=None):
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs, tensors, opts=None):
        joined = _same_for_all(lambda of: torch.cat([x.flatten() for x in of]))
        return self._meet("all_gather", tensors, outputs, joined)

    def reduce_scatter(self, outputs, lists, opts=None):  # type: ignore[override]
        check_contiguous("reduce_scatter", line_in(_local.rank.file), [*lists[0], *outputs])
        return self.reduce_scatter_single(outputs[0], torch.cat([part.flatten() for part in lists[0]]), opts)

    def reduce_scatter_single(self, output, tensor, opts=None):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, tensors, opts=None):
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def make(everyone):
            sums = [reduced([x.flatten() for x in of], op).chunk(len(everyone)) for of in zip(*everyone)]
            return [[of_ranks[k] for of_ranks in sums] for k in range(len(everyone))]

        return self._meet("reduce_scatter", tensors, outputs, make, (name_of(op),))

    def broadcast(self, tensors, opts):  # type: ignore[override]
        root = opts.rootRank
        return self._meet("broadcast", tensors, tensors, lambda all_: [all_[root]] * len(all_), (root,))

    def reduce(self, tensors, opts):  # type: ignore[override]
        root, op = opts.rootRank, opts.reduceOp

        def make(everyone):
            sums = _same_for_all(lambda of: reduced(of, op))(everyone)[root]
            return [sums if k == root else [None] * len(sums) for k in range(len(everyone))]

        return self._meet("reduce", tensors, tensors, make, (root, name_of(op)))

    def alltoall(self, outputs, tensors, opts=None):
        def make(everyone):
            return [[own[k] for own in everyone] for k in range(len(everyone))]

        return self._meet("all_to_all", tensors, outputs, make)

    def all_to_all_single(self, output, tensor, out_splits, in_splits, opts=None):
        outputs = list(output.split(list(out_splits)) if out_splits else output.chunk(self._size))
        return self.alltoall(outputs, list(tensor.split(list(in_splits)) if in_splits else tensor.chunk(self._size)))

    def gather(self, outputs, tensors, opts):  # type: ignore[override]
        root = opts.rootRank

        def make(everyone):
            return [[own[0] for own in everyone] if k == root else [] for k in range(len(everyone))]

        return self._meet("gather", tensors, outputs[0] if outputs else [], make, (root,), tensors)

    def scatter(self, outputs, lists, opts):  # type: ignore[override]
        root, own = opts.rootRank, lists[0] if lists else []
        return self._meet("scatter", own, outputs, lambda all_: [[part] for part in all_[root]], (root,), outputs)

    def barrier(self, opts=None):
        return self._meet("barrier", [], [], lambda all_: [[]] * len(all_))

    def send(self, tensors, to, tag=0):
        return self._message("send", self._rank, to, tag, tensors, [])

    def recv(self, tensors, source, tag=0):
        return self._message("receive", source, self._rank, tag, [], tensors)

    def _message(self, kind: str, source: int, to: int, tag: int, tensors: list, outputs: list) -> VirtualWork:
        """Start to send or to receive.

        A message is a meeting of one rank, the sender, which waits for nobody; the receiver waits until it is over.
        """
        me: VirtualRank = _local.rank
        line = line_in(me.file)
        members = dist.get_process_group_ranks(self)
        me.note(kind, line, tensors, outputs, members)
        key = (self.group_name, kind, source, to, tag)
        me.counts[key] = me.counts.get(key, 0) + 1
        meeting = me.ranks.meetings.setdefault((key[0], *key[2:], me.counts[key]), Meeting(1, lambda all_: all_))
        if kind == "send":
            with no_dispatch_modes():
                meeting.join(0, (kind, line), [x.detach().clone() for x in tensors], [])
        return VirtualWork(me, meeting, 0, outputs, kind, line)

    # The names of these methods before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce


class Watch:
    """The collectives that one rank ran while some of the learner's code was watched.

    Attributes:
        collectives: the collectives, in the order in which they were called.
        unwaited: the collectives whose ``wait()`` was never called, each as "dist.all_reduce (lab2.py:30)".
        unrecorded: the first collective that ran outside an autograd.Function on a tensor that requires a gradient, so
            that autograd doesn't know of it, as "all_reduce (lab2.py:30)"; "" if there is none.
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.unwaited: list[str] = []
        self.unrecorded = ""


class VirtualRank:
    """One virtual rank: the state of its thread, and what the judge records about it.

    Args:
        ranks: all ranks of the run.
        number: this rank's number, from 0.
        file: the learner's file; its lines are named in messages.

    Attributes:
        go: a lock that is released when it is this rank's turn.
        done: whether the rank's job has ended.
        thread: the identifier of the rank's thread.
        result: what the rank's job returned or raised.
        waits: the collective in which the rank waits, and the tuple (kind, …, line) of its call, which ``deadlock``
            takes; None if the rank can run.
        stop: an exception to raise at the rank's next turn; None if there is none.
        watches: the active ``Watch`` objects, which record the rank's collectives.
        unwaited: handles of collectives whose ``wait()`` hasn't been called.
        plain: whether the rank's latest collective came from torch.distributed and not from functional collectives.
        expected: numbers of the ranks among which a collective may run; None for any.
        counts: how many messages to and from each rank, and how many calls of ``gather``, this rank has made.
        state: the state of torch's default random generator on this rank.
        calls: how many calls of the learner's functions the case has made on this rank.
        call_began: the time at which the latest of these calls began.
    """

    def __init__(self, ranks: VirtualRanks, number: int, file: str):
        self.ranks, self.number, self.size, self.file = ranks, number, ranks.size, file
        self.go, self.done, self.thread = _locked(), False, 0
        self.result: Any = None
        self.waits: tuple[Meeting, tuple] | None = None
        self.stop: BaseException | None = None
        self.watches: list[Watch] = []
        self.unwaited: list[VirtualWork] = []
        self.plain = True
        self.expected: list[int] | None = None
        self.counts: dict[tuple, int] = {}
        self.state = torch.empty(0)
        self.calls, self.call_began = 0, 0.0

    def calling(self) -> None:
        """Record that the case is about to call a function of the learner's file."""
        self.calls, self.call_began = self.calls + 1, time.monotonic()

    def note(self, kind: str, line: str, tensors: list[Tensor], outputs: list[Tensor], members: list[int]) -> None:
        """Record that this rank is about to run a collective.

        Args:
            kind: the collective, such as "all_reduce".
            line: the line of the learner's file that calls it, or "".
            tensors: the collective's input tensors on this rank.
            outputs: the collective's output tensors on this rank.
            members: the numbers of the group's ranks among all ranks.

        Raises: OtherGroup if ``members`` aren't the ranks in ``expected``; Wrong if a tensor isn't contiguous where
            real backends need a contiguous one.
        """
        if self.expected is not None and members != self.expected:
            raise OtherGroup(kind, line)
        check_contiguous(kind, line, [*tensors, *outputs] if kind in _INTO_MEMORY else tensors)
        payload = max((sum(x.numel() * x.element_size() for x in xs) for xs in (tensors, outputs)), default=0)
        caller = sys._getframe(2)
        while caller.f_code.co_filename == __file__:
            caller = caller.f_back  # type: ignore[assignment]
        # Functional collectives are called by torch's dispatcher, below autograd.
        self.plain = caller.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        for watch in self.watches:
            watch.collectives.append(Collective(kind.replace("_", "-"), payload))
            if self.plain and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                watch.unrecorded = watch.unrecorded or f"{kind} ({line})"

    def wait_for(self, meeting: Meeting, kind: str, line: str = "") -> None:
        """Let other ranks run until all ranks of a collective have called it.

        Args:
            meeting: the collective, with the calls of the ranks so far.
            kind: the collective's name for messages, such as "all_reduce"; RETURNED for a call of ``gather``.
            line: the line of the learner's file that calls it, or "".

        Raises: ``meeting.wrong`` if the ranks' calls don't match; OutOfStep if all ranks wait; PeerStopped if another
            rank has ended the case.
        """
        while not meeting.over:
            self.waits = meeting, (kind, 0, "", line)
            self.ranks.next_turn(self)
            self.go.acquire()
            if self.stop is not None:
                error, self.stop = self.stop, None
                raise error
        self.waits = None
        if meeting.wrong is not None:
            raise meeting.wrong

    def gather(self, value: object) -> list:
        """Collect a value from every rank, in rank order.  Raises PeerStopped if another rank has ended the case."""
        if self.size == 1:
            return [value]
        self.counts[("gather",)] = count = self.counts.get(("gather",), 0) + 1
        meeting = self.ranks.meetings.setdefault(("gather", count), Meeting(self.size, lambda all_: [all_]))
        meeting.join(self.number, (RETURNED, 0, ""), value, range(self.size))
        self.wait_for(meeting, RETURNED)
        assert meeting.made is not None
        return list(meeting.made[0])

    @contextmanager
    def watching(self, expected: list[int] | None = None) -> Iterator[Watch]:
        """Make a context that records the collectives that run in it.  At its end all ranks wait for each other.

        Args:
            expected: numbers of the ranks among which collectives may run; None for any.

        Yields: a ``Watch``, whose ``collectives`` lists what ran.
        """
        watch, before, handles = Watch(), self.expected, list(self.unwaited)
        self.watches.append(watch)
        self.expected = expected
        try:
            yield watch
            if self.size > 1:
                self.gather(None)
            watch.unwaited = [f"dist.{work.kind} ({work.line})" for work in self.unwaited if work not in handles]
        finally:
            self.watches.remove(watch)
            self.expected = before


class VirtualRanks:
    """A number of virtual ranks.  ``run`` runs a job, which is a function, on each of them; jobs run one after another.

    Args:
        size: how many ranks there are.
        alone: True to make no process group, for jobs that use none; ``size`` must then be 1.

    Attributes:
        members: the ranks of the latest run.
        meetings: the collectives and messages of the latest run.  The key of the n-th collective of a group has the
            group's name, its ranks, and n.
        running: the rank that is executing now; None if no job runs.
    """

    def __init__(self, size: int, alone: bool = False):
        self.size, self.alone = size, alone
        self.members: list[VirtualRank] = []
        self.meetings: dict[tuple, Meeting] = {}
        self.running: VirtualRank | None = None
        self._over, self._turns = _locked(), deque[VirtualRank]()

    def run(self, job: Callable[[VirtualRank], Any], file: str = "") -> list:
        """Run a job on each rank.

        Args:
            job: a function that takes the ``VirtualRank`` on which it runs.
            file: the path of the learner's file, whose lines are named in messages about collectives; "" for none.

        Returns: for each rank, what the job returned there, or the exception that it raised.
        """
        self.meetings = {}
        self.members = [VirtualRank(self, number, file) for number in range(self.size)]
        store = dist.HashStore()
        before = _DEFAULT.get_state()
        for rank in self.members:
            rank.state = before
        with world_of_each_thread():
            for rank in self.members:
                threading.Thread(target=self._serve, args=(rank, job, store), daemon=True).start()
            self._begin_turn()
            self._over.acquire()
        _DEFAULT.set_state(before)
        return [rank.result for rank in self.members]

    def next_turn(self, rank: VirtualRank) -> None:
        """Give the turn to the next rank that can run.

        Args:
            rank: the rank that calls this, because it must wait or is done.
        """
        with no_dispatch_modes():
            rank.state = _DEFAULT.get_state()
            self._begin_turn()

    def _begin_turn(self) -> None:
        """Begin the next rank's turn; in each round every rank that can go on has one.

        The rank whose turn ends does this itself: that takes one switch of threads, not two.
        """
        if not self._turns:
            left = [rank for rank in self.members if not rank.done]
            able = [rank for rank in left if rank.waits is None or rank.waits[0].over]
            self._turns.extend(able or self._stop(left))
        self.running = self._turns.popleft() if self._turns else None
        if self.running is None:
            self._over.release()
        else:
            _DEFAULT.set_state(self.running.state)
            self.running.go.release()

    def _serve(self, rank: VirtualRank, job: Callable[[VirtualRank], Any], store: dist.Store) -> None:
        """Run a rank's job in this thread, when its turn comes."""
        _local.rank, rank.thread = rank, threading.get_ident()
        rank.go.acquire()
        try:
            if not self.alone:
                dist.init_process_group("virtual", rank=rank.number, world_size=self.size, store=store)
            rank.result = job(rank)
        except BaseException as error:
            rank.result = error
        rank.done = True
        self.next_turn(rank)

    def _stop(self, waiting: list[VirtualRank]) -> list[VirtualRank]:
        """End all ranks that wait, where none can go on, by an exception that says why; return these ranks."""
        if len(waiting) < self.size:
            why: BaseException = PeerStopped()  # a rank that is done has the reason
        else:
            why = OutOfStep(deadlock({rank.number: rank.waits[1] for rank in waiting if rank.waits}))
        for rank in waiting:
            rank.stop = why
        return waiting


dist.Backend.register_backend("virtual", lambda store, rank, size, timeout: Group(rank, size), devices=["cpu"])
