"""A lab's process: the rules that every lab has for how it writes, fails and ends."""

from __future__ import annotations

import gc
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType

import torch
import torch.distributed as dist

from actmem_course.console import lab_console as lab_console  # labs take it from here
from actmem_course.guard import Guard, done, leave, say

#: Set, it shows the traceback of an error beside its line.
TRACEBACK = "ACTMEM_TRACEBACK"


def lab(main: Callable[..., int]) -> Callable[..., int]:
    """Let a lab's ``main`` end in an exit code and at most one line, whatever happens.

    An error is one line with the rank and the cause, from one rank.  Ctrl-C is quiet.  What can't
    be shown in the screen's encoding is replaced.  Nothing that holds a process group outlives it.
    """

    @wraps(main)
    def run(*args) -> int:
        program = os.path.basename(sys.argv[0])
        prepare_streams(program)
        try:
            code = main(*args)
            sys.stdout.flush()
        except KeyboardInterrupt:
            leave(130)
        except SystemExit:
            done()
            raise
        except BaseException as error:  # not an Exception, but an error: torch's CheckpointException
            fail(program, error)
        gc.collect()  # what main held is free now
        done()
        return code

    return run


def prepare_streams(program: str) -> None:
    """Make printing safe; end the process if there is nowhere to print."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        say(f"{program}: standard output is closed")
        leave(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def fail(program: str, error: BaseException) -> None:
    """Say what went wrong, if it is this rank's own, and end all ranks."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):  # who read the output has enough
        leave(1)
    guard = Guard.current
    if guard and guard.store.size > 1:
        guard.give_up(cause_of(error), echo=_of_another(error))
    say(f"{program}: {cause_of(error)}")
    leave(1)


def _of_another(error: BaseException) -> bool:
    """Whether an exchange failed because the other side is gone, as far as its text tells."""
    text = str(error)
    if "NCCL" in text:
        return any(word in text for word in _NCCL_OF_ANOTHER)
    return isinstance(error, dist.DistError) or "gloo/transport" in text


#: In NCCL's errors: the other side is gone, or the communicator was ended after an error elsewhere.
_NCCL_OF_ANOTHER = ("ncclRemoteError", "remote process", "aborted", "closed by remote peer", "Watchdog caught")


def cause_of(error: BaseException) -> str:
    """An error in a line: what happened, and where in the course's files."""
    if failures := getattr(error, "failures", None):  # of torch's CheckpointException: by rank, with where it was
        rank, (first, _) = min(failures.items())
        return f"a save or its reading failed on rank {rank}: {cause_of(first)}"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = lines[0] if lines else ""
    if isinstance(error, OSError) and error.strerror and not isinstance(error, (ConnectionError, TimeoutError)):
        return f"cannot write {error.filename or 'standard output'}: {error.strerror}"
    if isinstance(error, torch.OutOfMemoryError):
        return _out_of_gpu_memory(text)
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"out of memory: {text.rpartition('] ')[2]}".removesuffix(": ")
    if found := re.search(r"NCCL error in: \S+ ([^(,]*)", text):
        last = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else lines[1:]
        return f"NCCL: {': '.join([found[1].strip(), *last[:1]])}"
    where = _last_own(error.__traceback__)
    return f"{type(error).__name__}: {text[:200]}{where and f' ({where}; for more, set {TRACEBACK}=1)'}"


def _out_of_gpu_memory(text: str) -> str:
    """What was asked for, what this rank holds and what is free on its GPU."""
    asked = re.search(r"allocate ([\d.]+ \w+)", text)
    parts = [f"{asked[1]} asked for"] if asked else []
    with suppress(RuntimeError, AssertionError):  # a GPU that failed may not answer
        free, whole = (number / 2**30 for number in torch.cuda.mem_get_info())
        held = torch.cuda.memory_allocated() / 2**30
        parts.append(f"{held:.2f} GiB held by this rank, {free:.2f} of {whole:.2f} GiB free")
    return f"out of memory on a GPU: {', '.join(parts) or text}"


def _last_own(trace: TracebackType | None) -> str:
    own = [frame for frame in traceback.extract_tb(trace) if "site-packages" not in frame.filename]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
