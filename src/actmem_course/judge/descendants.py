"""End all that this process has started, at whatever distance.

On Linux also what left its session and lost its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

#: prctl(2): what a descendant leaves behind becomes a child of this process, and not of init.
_SET_CHILD_SUBREAPER = 36
#: How long processes may take to end.
_SECONDS = 10


def adopt_orphans() -> None:
    """From now on ``end_descendants`` finds every process that this one's children leave behind.  Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> bool:
    """Kill them until none is left, for they may start others meanwhile.

    Nobody may wait for one of them.

    Returns: whether none is left.
    """
    end = time.monotonic() + _SECONDS
    while found := _descendants():
        for number in found:
            with suppress(OSError):  # gone, or of another user
                os.kill(number, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _descendants() -> set[int]:
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):  # none where there is no /proc
        with suppress(OSError, ValueError):
            # The name, in parentheses, may have spaces and parentheses in it.
            parents[int(status.parent.name)] = int(status.read_text(errors="replace").rpartition(")")[2].split()[1])
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {number for number, parent in parents.items() if parent in found}
    return found - {os.getpid()}
