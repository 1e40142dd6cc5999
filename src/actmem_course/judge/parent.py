"""The judge's process as seen from its parent: start it, send it a file to judge, receive its messages, end it.

The parent doesn't import torch, so that a command answers at once.  If the process takes too long, the parent asks it
at which line the learner's code is.  If the process dies before its verdict, the parent makes the verdict.
"""

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

#: Environment variables that give the process two file descriptors: of the pipe to the parent, and of the file where
#: Python's faulthandler writes a traceback if it crashes.
LINE, CRASHES = "ACTMEM_JUDGE_LINE", "ACTMEM_CRASHES"
#: How long the process may take until it can judge.  The machine may be busy with other things.
_START_SECONDS = 180
#: How long the process may go on judging a file after that has been saved again.
_OUTDATED_SECONDS = 2.0
#: What the process runs.  It takes the current folder off Python's path, so that a learner's torch.py isn't torch.
_RUN = (
    "import sys; sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]; "
    "from actmem_course.judge.worker import main; main()"
)


class Stuck(Exception):
    """The judge's process has died or takes too long.  The message is a verdict's text, with the learner's line."""


class Outdated(Exception):
    """The learner's file has been saved again while it was judged, so the verdict would be outdated."""


class JudgeProcess:
    """The judge's process, in which all virtual ranks run.

    Attributes:
        ready: whether it has imported torch and can judge.
        busy: whether it is still judging an outdated version of the file.
    """

    def __init__(self) -> None:
        self.ready = self.busy = False
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process if it doesn't run yet; return at once, before the process is ready to judge."""
        if self._process:
            return
        self._line, theirs = Pipe()
        self._crashes, self.ready, self.busy = tempfile.TemporaryFile(), False, False
        # One thread for torch: a learner's tensors are small.
        env = {"OMP_NUM_THREADS": "1", **os.environ, LINE: str(theirs.fileno()), CRASHES: str(self._crashes.fileno())}
        with theirs:
            handed = theirs.fileno(), self._crashes.fileno()
            command = [sys.executable, "-c", _RUN]
            self._process = subprocess.Popen(command, env=env, pass_fds=handed, stdin=subprocess.DEVNULL)

    def end(self) -> None:
        """Kill the process, if it runs."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._line.close()
            self._crashes.close()
            self._process = None

    def ask(self, file: str, outdated: Callable[[], bool] = lambda: False, **command: Any) -> Iterator[dict[str, Any]]:
        """Have the process judge a learner's file; start it if it doesn't run.

        Args:
            file: the file's path.
            outdated: returns whether the file has been saved again.
            command: what to judge, as keywords, such as lab="lab2_tensor_parallel", only=["2.1"] and size=4;
                ``Worker.judge`` lists all of them.

        Yields: the process's messages, each a dict with one of these keys: "begin" with an exercise's number, "printed"
            with a line of output, "verdict" with a verdict's fields, "moves" while the judge is at work, and "done" at
            the end.

        Raises: Stuck if the process dies or an exercise takes too long; Outdated if the file has been saved again.
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
        with suppress(OSError):  # if it has died, the next call of _heard finds out
            self._line.send_bytes(json.dumps(message).encode())

    def _heard(self, file: str, seconds: float = 0.1) -> dict[str, Any]:
        """Wait a moment for a message; return it, or {} if none comes.  Raises Stuck if the process has died."""
        try:
            message = json.loads(self._line.recv_bytes()) if self._line.poll(seconds) else {}
        except (EOFError, OSError):
            raise Stuck(self._ended(file)) from None
        self.ready |= "ready" in message
        return message

    def _late(self, file: str, limit: float) -> str:
        """Say in words where the process is, after it has taken longer than ``limit`` seconds."""
        self._tell(do="where", file=file)
        where, seconds, deadline = "it has gone silent", math.inf, time.monotonic() + 2
        with suppress(Stuck):
            while time.monotonic() < deadline:
                message = self._heard(file)
                if "where" in message:
                    where, seconds = message["where"], message["in_call"]
                    break
        # If the case called the function again only a moment ago, the function does come to an end.
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
        match = re.search(rf'File "{re.escape(file)}", line (\d+) in (\S+)', trace)
        where = f", at {os.path.basename(file)}:{match[1]}, in {match[2]}" if match else ""
        return f"it died: {how}{where}"


@contextmanager
def signals_end() -> Iterator[None]:
    """Make a context in which a signal raises SystemExit, so that this process can end its child before it exits."""

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
