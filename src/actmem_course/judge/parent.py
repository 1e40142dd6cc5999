"""The judge's process as its parent sees it: started, followed, ended.  Loads no torch, so that it is there at once.

The parent tells it what to judge and passes on what it says.  A process that takes too long is asked where it stands.
One that ends before its verdict has no verdict but the parent's.
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
from multiprocessing import Pipe
from types import FrameType
from typing import Any

#: In the environment: the file descriptors of the process's line, and of where a crash is noted.
LINE, CRASHES = "ACTMEM_JUDGE_LINE", "ACTMEM_CRASHES"
#: How long it may take until it can judge, on a machine that does other things too.
_START_SECONDS = 180
#: How long it may go on with a file that has been saved again.
_OUTDATED_SECONDS = 2.0
#: Python does not look for modules where it was started: a torch.py there is not torch.
_RUN = (
    "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]; "
    "from actmem_course.judge.worker import main; main()"
)


class Stuck(Exception):
    """The process ended, or takes too long.  The message says where, for a verdict."""


class Outdated(Exception):
    """The file has been saved again, so this verdict is outdated."""


class JudgeProcess:
    """A process with all virtual ranks.

    ready: whether it has loaded torch.  busy: whether it still judges a file that has been saved again.
    """

    def __init__(self) -> None:
        self.ready = self.busy = False
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it if it isn't there; ``ask`` waits until it is ready."""
        if self._process:
            return
        self._line, theirs = Pipe()
        self._crashes, self.ready, self.busy = tempfile.TemporaryFile(), False, False
        # One thread: a learner's tensors are small.
        own = {"OMP_NUM_THREADS": "1", **os.environ, LINE: str(theirs.fileno()), CRASHES: str(self._crashes.fileno())}
        with theirs:
            handed = theirs.fileno(), self._crashes.fileno()
            command = [sys.executable, "-c", _RUN]
            self._process = subprocess.Popen(command, env=own, pass_fds=handed, stdin=subprocess.DEVNULL)

    def end(self) -> None:
        """End it at once."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._line.close()
            self._crashes.close()
            self._process = None

    def ask(self, file: str, outdated: Callable[[], bool] = lambda: False, **command: Any) -> Iterator[dict[str, Any]]:
        """Have it judge the learner's file; what it says meanwhile.

        outdated: whether the file has been saved again.  Raises Stuck, and Outdated.
        """
        self.start()
        asked, limit, since, saved = False, float(_START_SECONDS), time.monotonic(), 0.0
        message: dict[str, Any] = {}
        while "done" not in message:
            if self.ready and not asked:
                asked, since = True, time.monotonic()
                self._tell(file=file, **command)
            message = self._heard(file)
            if {"begin", "moves", "verdict"} & message.keys():
                since, limit = time.monotonic(), message.get("seconds", limit)
            if message and not saved:
                yield message
            if not saved and outdated():
                saved = time.monotonic()
            if saved and not asked or saved and time.monotonic() - saved > _OUTDATED_SECONDS:
                self.busy = asked
                raise Outdated
            if time.monotonic() - since > limit:
                raise Stuck(self._late(file, limit))
        if saved:
            raise Outdated

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):  # it has died, which shows when it is heard next
            self._line.send_bytes(json.dumps(message).encode())

    def _heard(self, file: str, seconds: float = 0.1) -> dict[str, Any]:
        """What it says within a moment; nothing otherwise.  Raises Stuck if it has ended."""
        try:
            message = json.loads(self._line.recv_bytes()) if self._line.poll(seconds) else {}
        except (EOFError, OSError):
            raise Stuck(self._ended(file)) from None
        self.ready |= "ready" in message
        return message

    def _late(self, file: str, limit: float) -> str:
        """What to say if it takes longer than its limit."""
        self._tell(do="where", file=file)
        where, seconds, deadline = "it has gone silent", math.inf, time.monotonic() + 2
        with suppress(Stuck):
            while time.monotonic() < deadline:
                message = self._heard(file)
                if "where" in message:
                    where, seconds = message["where"], message["in_call"]
                    break
        # What began another call a moment ago comes to an end, if one waits.
        late = "too slow, not done" if seconds < limit / 2 else "no end"
        return f"{late} after {limit:g} s: {where}"

    def _ended(self, file: str) -> str:
        assert self._process
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it has closed its line"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == 0:
            how = "it ended the process by itself, with exit code 0 and without a verdict"
        self._crashes.seek(0)
        trace = self._crashes.read().decode("utf-8", "replace")  # by Python's faulthandler
        found = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)', trace)
        where = f", at {os.path.basename(file)}:{found[1]}, in {found[2]}" if found else ""
        return f"it died: {how}{where}"


@contextmanager
def signals_end() -> Iterator[None]:
    """Signals end this process by SystemExit, so that it can end its own."""

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
