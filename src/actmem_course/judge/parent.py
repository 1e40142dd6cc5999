"""One parent that starts the processes of the judge, follows each, and ends them.  Loads no torch, so that it is
there at once.

It tells them what to judge and passes on what they say.  One that takes too long is asked where it stands.  One that
ends before its verdict has no verdict but the parent's.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from socket import socket
from types import FrameType
from typing import IO, Any

from actmem_course.launch import loopback_listener, rank_environment

#: The file descriptors of a process's line, of what rank 0 listens on and of where a crash is noted, and how many
#: virtual
#: ranks it has, by name in the environment.
RANKS_LINE, RANKS_STORE, VIRTUAL = "ACTMEM_RANKS_LINE", "ACTMEM_RANKS_STORE", "ACTMEM_VIRTUAL"
CRASHES = "ACTMEM_CRASHES"
#: How long processes may take until they can judge, on a machine that does other things too.
START_SECONDS = 180
#: How long one may go on with a file that has been saved again.
_OUTDATED_SECONDS = 1.0
#: Python does not look for modules where it was started: a torch.py there is not torch.
_RUN = (
    "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]; "
    "from actmem_course.judge.worker import main; main()"
)


class Stuck(Exception):
    """A process ended, or takes too long.  The message says which and where, for a verdict."""


class Outdated(Exception):
    """The file has been saved again, so this verdict is outdated."""


@dataclass
class Member:
    """One process as the parent sees it.  line: JSON objects both ways.  crashes: what Python wrote when it crashed."""

    number: int
    process: subprocess.Popen
    line: Connection
    crashes: IO[bytes]
    ready: bool = False
    done: bool = True

    def tell(self, **message: Any) -> None:
        with suppress(OSError):  # it has died, which shows when it is heard next
            self.line.send_bytes(json.dumps(message).encode())

    def where(self, file: str) -> tuple[str, float]:
        """Where it stands in ``file``, in its own words, and for how many seconds the latest of several calls has
        run."""
        self.tell(do="where", file=file)
        with suppress(EOFError, OSError):
            deadline = time.monotonic() + 2
            while self.line.poll(max(0.0, deadline - time.monotonic())):
                message = json.loads(self.line.recv_bytes())
                if "where" in message:
                    return message["where"], message["in_call"]
        return "it has gone silent", math.inf

    def crashed_at(self, file: str) -> str:
        """The line of ``file`` that ran when it crashed, as Python's faulthandler wrote it; "" if it wrote none."""
        self.crashes.seek(0)
        trace = self.crashes.read().decode("utf-8", "replace")
        found = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)', trace)
        return f", at {os.path.basename(file)}:{found[1]}, in {found[2]}" if found else ""


@dataclass
class RankParent:
    """``size`` ranks on ``device``: virtual, in one process, or a process each.  alone: one that meets nobody."""

    size: int
    device: str
    alone: bool = False
    virtual: bool = False
    members: list[Member] = field(default_factory=list)

    def start(self) -> None:
        """Start what isn't there; ``ask`` waits until it is ready."""
        if self.members:
            return
        # Rank 0 serves the store already when torch's own start looks for one.
        listener = None if self.virtual or self.alone else loopback_listener()
        count = 1 if self.virtual else self.size
        for number in range(count):
            self.members.append(self._start(number, count, listener))
        if listener:
            listener.close()

    def _start(self, number: int, count: int, listener: socket | None) -> Member:
        ours, theirs = Pipe()
        crashes = tempfile.TemporaryFile()
        own = rank_environment(number, count, listener.getsockname() if listener else None)
        own |= {"ACTMEM_DEVICE": self.device, RANKS_LINE: str(theirs.fileno()), CRASHES: str(crashes.fileno())}
        handed = [theirs.fileno(), crashes.fileno()]
        if self.virtual:
            own[VIRTUAL] = "1"
        if listener and number == 0:
            own[RANKS_STORE] = str(listener.fileno())
            handed.append(listener.fileno())
        with theirs:
            command = [sys.executable, "-c", _RUN]
            process = subprocess.Popen(command, env=own, pass_fds=handed, stdin=subprocess.DEVNULL)
        return Member(number, process, ours, crashes)

    def end(self) -> None:
        """End all of them at once."""
        for member in self.members:
            with suppress(OSError):
                member.process.kill()
        for member in self.members:
            member.process.wait()
            member.line.close()
            member.crashes.close()
        self.members = []

    def ask(self, file: str, outdated: Callable[[], bool] = lambda: False, **command: Any) -> Iterator[dict[str, Any]]:
        """Tell all to do something in the learner's file; what the first says meanwhile, and every verdict.

        outdated: whether the file has been saved again.  Raises Stuck, and Outdated.
        """
        self.start()
        torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        asked, limit, since, stopped = False, float(START_SECONDS), time.monotonic(), 0.0
        for member in self.members:
            member.done = False
        while not all(member.done for member in self.members):
            if not asked and all(member.ready for member in self.members):
                asked, since = True, time.monotonic()
                for member in self.members:
                    member.tell(file=file, **command)
            for member, message in self._heard(file):
                if member.number == 0 and {"begin", "note", "verdict"} & message.keys():
                    since, limit = time.monotonic(), message.get("seconds", limit)
                if (member.number == 0 or "verdict" in message) and not stopped:
                    yield message
            if torchrun not in (None, os.getppid()):  # what started this process is gone
                self.end()
                raise SystemExit(1)
            if not stopped and outdated():
                stopped = self._stop(asked)
            if stopped and time.monotonic() - stopped > _OUTDATED_SECONDS:
                self.end()
                break
            if time.monotonic() - since > limit:
                raise Stuck(self._late(file, limit))
        if stopped:
            raise Outdated

    def _heard(self, file: str) -> Iterator[tuple[Member, dict[str, Any]]]:
        """What the processes say within a moment.  Raises Stuck if one has ended."""
        by_line = {member.line: member for member in self.members}
        for line in wait(list(by_line), 0.1):
            member = by_line[line]  # type: ignore[index]
            try:
                message = json.loads(member.line.recv_bytes())
            except (EOFError, OSError):
                raise Stuck(self._ended(member, file)) from None
            member.ready |= "ready" in message
            member.done |= "done" in message
            yield member, message

    def _stop(self, asked: bool) -> float:
        """Have what goes on end, because nobody waits for it; when that was.  Raises Outdated if nothing goes on."""
        if not asked:
            raise Outdated
        for member in self.members:
            member.tell(do="stop")
        return time.monotonic()

    def _late(self, file: str, limit: float) -> str:
        """What to say of processes that take longer than their limit."""
        places = [(member.number, *member.where(file)) for member in self.members]
        said = "; ".join(f"rank {k} {said}" if len(places) > 1 else said for k, said, _ in places)
        # Who began another call a moment ago comes to an end, if one waits.
        slow = all(seconds < limit / 2 for *_, seconds in places)
        late = f"too slow, not done after {limit:g} s" if slow else f"no end after {limit:g} s"
        return f"{late}: {said}"

    def _ended(self, member: Member, file: str) -> str:
        try:
            code = member.process.wait(5)
        except subprocess.TimeoutExpired:
            return f"rank {member.number} has closed its line"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == 0:
            how = "it ended the process by itself, with exit code 0 and without a verdict"
        return f"{'it' if len(self.members) == 1 else f'rank {member.number}'} died: {how}{member.crashed_at(file)}"


@contextmanager
def signals_end(*parents: RankParent) -> Iterator[None]:
    """Whatever ends this process ends theirs."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for parent in parents:
            parent.end()
