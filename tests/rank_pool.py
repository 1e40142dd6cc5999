"""A few processes that stay alive for the whole test run: the ranks of a gloo group.

Starting processes takes seconds, running a function on them milliseconds.  A test passes a
function defined at the top level of its module; every rank runs it, and the results come back in
the order of the ranks.
"""

import gc
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actmem_course.ranks import served_store
from tests.patience import SECONDS

#: Every rank is forked from one process that has loaded these, and nothing else: it has no threads and no groups.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "actmem_course.ranks", "tests.rank_pool"])


#: How long the others may take once a rank has failed: they may wait for it.
AFTER_A_FAILURE = 60
#: Each group that tests make has two threads, of which gloo's own wakes up a hundred times a second: a rank with
#: two hundred of them takes a tenth of a processor and does nothing.
MOST_THREADS = 24


class RankFailed(AssertionError):
    """One rank raised; the message holds its traceback."""


class RankPool:
    """``size`` processes in one process group.  A failure makes a new group."""

    def __init__(self, size: int):
        self.size = size
        self._processes: list = []

    def run(self, function, *args) -> list:
        """``function(*args)`` on every rank; the results by rank.  Raises RankFailed."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        seconds = SECONDS
        while len(answers) < self.size:
            answered = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], seconds)
            if not answered:
                break
            answers |= {rank: pipe.recv() for rank, pipe in enumerate(self._pipes) if pipe in answered}
            if not all(ok for ok, _ in answers.values()):
                seconds = AFTER_A_FAILURE
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        failed += [f"rank {rank} did not answer within {seconds} s" for rank in range(self.size) if rank not in answers]
        if failed:
            self.stop()  # the other ranks may be out of step
            raise RankFailed("\n".join(failed))
        return [answers[rank][1] for rank in range(self.size)]

    def leave_few_threads(self) -> None:
        """Stop the ranks if tests have left many groups there; the next function starts new ones."""
        if any(_threads(process.pid) > MOST_THREADS for process in self._processes):
            self.stop()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
            self._served.__exit__(None, None, None)
        self._processes = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        self._served = served_store()  # for what ranks say beside their group
        address = self._served.__enter__()
        self._pipes = []
        for rank in range(self.size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self.size, store, address, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


def _threads(process: int) -> int:
    """How many threads a process has; 0 where the system has no list of them."""
    tasks = Path(f"/proc/{process}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _serve(rank: int, size: int, store: str, address: tuple[str, int], pipe) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a ledger looks for weights among all objects: there are none yet
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    place: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **place, timeout=timedelta(seconds=SECONDS))
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
