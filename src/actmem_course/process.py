"""Make every lab end in the same way: an exit code, and at most one line of error."""

import atexit
import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import NoReturn

import torch.distributed as dist

from actmem_course.arguments import report_error

#: The environment variable that, if set, shows an error's traceback besides its line.
TRACEBACK = "ACTMEM_TRACEBACK"


def lab(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a lab's ``main`` so that any exception ends the process with an exit code and at most one line of error.

    The line names the rank and the cause. Ctrl-C prints nothing. Characters that the terminal's encoding doesn't have
    are replaced.

    Args:
        main: the lab's function, which returns the exit code.
    """

    @wraps(main)
    def run(*args) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            code = main(*args)
            sys.stdout.flush()
        except KeyboardInterrupt:
            leave(130)
        except Exception as error:
            fail(error)
        if "RANK" in os.environ:
            atexit.register(leave, code)
        return code

    return run


def fail(error: BaseException) -> NoReturn:
    """Print the error in one line and end this rank; the process that started the ranks then ends the other ranks.

    Args:
        error: an exception that was raised, with its traceback.
    """
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):  # who read the output has enough
        leave(1)
    if isinstance(error, dist.DistError) or "gloo" in str(error):  # another rank is gone, as far as the text tells
        time.sleep(5)  # to be ended, so that the other one's cause is what is said
    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    report_error(os.path.basename(sys.argv[0]), rank + cause_of(error))
    leave(1)


def leave(code: int) -> NoReturn:
    """End the process at once, without Python's shutdown.

    Python's shutdown may wait for other ranks. It also aborts if a thread of gloo is still running and frees a tensor
    that has a Python object.

    Args:
        code: the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def cause_of(error: BaseException) -> str:
    """Return a line of text that says what happened, and at which line of the course's files.

    Args:
        error: an exception that was raised, with its traceback.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = lines[0][:200]
    if isinstance(error, OSError) and error.strerror and not isinstance(error, (ConnectionError, TimeoutError)):
        return f"cannot write {error.filename or 'standard output'}: {error.strerror}"
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"out of memory: {text.rpartition('] ')[2]}".removesuffix(": ")
    if "NCCL" in text and len(lines) > 1:
        return f"{text}: {lines[-1]}"  # NCCL's own last error
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f" ({os.path.basename(ours[-1].filename)}:{ours[-1].lineno}; for more, set {TRACEBACK}=1)" if ours else ""
    return f"{type(error).__name__}: {text}{where}"
