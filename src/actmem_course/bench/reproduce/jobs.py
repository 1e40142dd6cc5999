"""Run measurements that do not depend on each other, in this process or in several."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One call.  function: of a module, so that another process can find it by name; label: for the screen."""

    function: Callable[..., Any]
    arguments: tuple
    label: str = ""


#: What each job gave.
Results = dict[Job, Any]


@dataclass(frozen=True)
class Usage:
    """What the jobs took.  peak_bytes: the most that all processes together can have held; 0 where unknown."""

    seconds: float
    processes: int
    peak_bytes: int


def run_jobs(
    jobs: Iterable[Job], processes: int = 1, on_done: Callable[[Job], None] = lambda job: None
) -> tuple[Results, Usage]:
    """Run each different job once.  on_done: called here after each, in any order."""
    jobs = list(dict.fromkeys(jobs))
    # Starting a process takes as long as a few jobs.
    processes = max(1, min(processes, len(jobs) // 4))
    started = time.monotonic()
    results: Results = {}
    peaks: dict[int, int] = {}
    for job, (pid, peak, result) in _finished(jobs, processes):
        results[job] = result
        peaks[pid] = max(peak, peaks.get(pid, 0))
        on_done(job)
    peaks[os.getpid()] = _peak_bytes()
    return results, Usage(time.monotonic() - started, processes, sum(peaks.values()))


def _finished(jobs: list[Job], processes: int):
    if processes == 1:
        yield from ((job, _run(job)) for job in jobs)
        return
    # A forked process would inherit torch's threads in the middle of their work.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_run, job): job for job in jobs}
        try:
            yield from ((running[future], future.result()) for future in as_completed(running))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(job: Job) -> tuple[int, int, Any]:
    result = job.function(*job.arguments)
    return os.getpid(), _peak_bytes(), result


def _peak_bytes() -> int:
    """The most memory that this process has held so far."""
    # Linux hands ru_maxrss down through fork and exec: a small child of a large process would report its parent's.
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))):
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
