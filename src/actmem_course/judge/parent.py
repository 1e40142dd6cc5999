"""One parent that starts the ranks, follows each, and ends them.  Loads no torch, so that it is there at once.

It tells the ranks what to judge and passes on what they say.  A rank that takes too long is asked
by a signal where it stands, which its C code answers.  One that ends before its verdict has no
verdict but the parent's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, BinaryIO

#: The file descriptors of a rank's line, of its trace, and of what rank 0 listens on, by name in the environment.
RANKS_LINE, RANKS_TRACE, RANKS_STORE = "ACTMEM_RANKS_LINE", "ACTMEM_RANKS_TRACE", "ACTMEM_RANKS_STORE"
#: How long ranks may take until they can judge, on a machine that does other things too.
START_SECONDS = 180


class Stuck(Exception):
    """A rank ended, or takes too long.  The message says which and where, for a verdict."""


@dataclass
class Member:
    """One rank as the parent sees it.  line: JSON objects both ways.  waits_in: the collective that it is in, if it is in one."""

    number: int
    process: subprocess.Popen
    line: Connection
    trace: BinaryIO
    waits_in: str = ""
    ready: bool = False
    done: bool = True

    def where(self, file: str) -> str:
        """Where the rank stands in ``file``, to follow "rank 1" in a sentence."""
        if not hasattr(signal, "SIGUSR1"):
            return "takes too long"
        before = os.fstat(self.trace.fileno()).st_size
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while os.fstat(self.trace.fileno()).st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)
        text = os.pread(self.trace.fileno(), 1 << 16, before).decode(errors="replace")
        own = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)', text)
        if not text:
            return "has gone silent"
        line = f"{os.path.basename(file)}:{own[1]}" if own else ""
        if self.waits_in:
            return f"is waiting in {self.waits_in}" + (f" ({line})" if line else "")
        return f"is at {line}, in {own[2]}" if own else "is in none of your functions"


@dataclass
class RankParent:
    """``size`` ranks on ``device``; alone: a rank that meets nobody."""

    size: int
    device: str
    alone: bool = False
    members: list[Member] = field(default_factory=list)

    def start(self) -> None:
        """Start what isn't there; ``judge`` waits until it is ready."""
        if self.members:
            return
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "GROUP_"))},
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "ACTMEM_DEVICE": self.device,
        }
        listener = None
        if self.alone:
            environment = {k: v for k, v in environment.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
        else:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))  # nobody on another machine reaches it
            listener.listen()
            host, port = listener.getsockname()
            # Rank 0 serves the store already when torch's own start looks for one.
            environment |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for number in range(self.size):
            ours, theirs = Pipe()
            trace = tempfile.TemporaryFile()
            own = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
            own |= {RANKS_LINE: str(theirs.fileno()), RANKS_TRACE: str(trace.fileno())}
            handed = [theirs.fileno(), trace.fileno()]
            if listener and number == 0:
                own[RANKS_STORE] = str(listener.fileno())
                handed.append(listener.fileno())
            command = [sys.executable, "-m", "actmem_course.judge.worker"]
            with theirs:
                process = subprocess.Popen(command, env=own, pass_fds=handed)
            self.members.append(Member(number, process, ours, trace))
        if listener:
            listener.close()

    def end(self) -> None:
        """End all ranks at once."""
        for member in self.members:
            with suppress(OSError):
                member.process.kill()
        for member in self.members:
            member.process.wait()
            member.line.close()
            member.trace.close()
        self.members = []

    def ask(self, file: str, **command: Any) -> Iterator[dict[str, Any]]:
        """Tell all ranks to do something in the learner's file; what rank 0 says meanwhile.  Raises Stuck."""
        self.start()
        torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        asked, limit, since = False, float(START_SECONDS), time.monotonic()
        for member in self.members:
            member.done, member.waits_in = False, ""
        by_line = {member.line: member for member in self.members}
        while not all(member.done for member in self.members):
            if not asked and all(member.ready for member in self.members):
                asked, since = True, time.monotonic()
                for member in self.members:
                    member.line.send_bytes(json.dumps({"file": file, **command}).encode())
            for line in wait(list(by_line), 0.1):
                member = by_line[line]  # type: ignore[index]
                try:
                    message = json.loads(member.line.recv_bytes())
                except (EOFError, OSError):
                    raise Stuck(self._ended(member)) from None
                member.ready |= "ready" in message
                member.done |= "done" in message
                member.waits_in = message.get("waits_in", member.waits_in)
                if member.number == 0 and {"begin", "note", "verdict"} & message.keys():
                    since, limit = time.monotonic(), message.get("seconds", limit)
                if member.number == 0 and "waits_in" not in message:
                    yield message
            if torchrun not in (None, os.getppid()):  # what started this process is gone
                self.end()
                raise SystemExit(1)
            if time.monotonic() - since > limit:
                places = "; ".join(f"rank {member.number} {member.where(file)}" for member in self.members)
                raise Stuck(f"no end after {limit:g} s: {places}")

    def _ended(self, member: Member) -> str:
        try:
            code = member.process.wait(5)
        except subprocess.TimeoutExpired:
            return f"rank {member.number} has closed its line"
        who = "it" if self.size == 1 else f"rank {member.number}"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == 0:
            return f"{who} died: it ended the process by itself, with exit code 0 and without a verdict"
        return f"{who} died: {how}"


@contextmanager
def signals_end(parent: RankParent) -> Iterator[None]:
    """Whatever ends this process ends its ranks."""
    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]

    def end(number, frame):
        parent.end()
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        parent.end()
        for number, handler in before.items():
            signal.signal(number, handler)
