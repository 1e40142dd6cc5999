"""Ranks on this machine without torchrun: one parent starts them, ends them together and says why.

The parent uses the part of torchrun that watches processes, and serves the store where the ranks meet on the loopback
interface only.  torchrun's own store listens on every interface.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext

from actmem_course.arguments import PARENT_REPORTS, print_error
from actmem_course.launch import loopback_listener, rank_environment

#: How long ranks that are told to end may take.
GRACE_SECONDS = 8


def start_ranks(script: str, arguments: list[str], size: int) -> int:
    """Run a script as ``size`` ranks on this machine.  When one fails, the others are ended.

    Args:
        script: its path.
        arguments: what follows the script on each rank's command line.
        size: the number of ranks.

    Returns:
        The exit code: 0 if all ranks ended with 0, 130 after Ctrl-C, 128 + n after another signal of number n, else
        2 or 1 as the first rank that failed.
    """
    program = os.path.basename(script)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # one line of ours says it all
    with served_store() as address, tempfile.TemporaryDirectory() as folder:
        context = SubprocessContext(
            program,
            sys.executable,
            args={rank: (script, *arguments) for rank in range(size)},
            envs={rank: rank_environment(rank, size, address) | {PARENT_REPORTS: "1"} for rank in range(size)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            context.start()
            result = context.wait(period=0.05)
        except SignalException as ended:
            context.close(timeout=GRACE_SECONDS)
            if ended.sigval != signal.SIGINT:
                print_error(program, f"ended by {ended.sigval.name}")
            return 128 + ended.sigval
    if result is None or not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode < 0:
        print_error(program, f"rank {first.local_rank} was ended by {first.signal_name()}")
    elif isinstance(first.message, dict):  # the rank wrote it; without, exit code 1 is a lab's result
        print_error(program, first.message["message"])
    return 2 if first.exitcode == 2 else 1


@contextmanager
def served_store() -> Iterator[tuple[str, int]]:
    """The host and port of a store for the ranks, which nobody on another machine can reach."""
    with loopback_listener() as listener:
        host, port = listener.getsockname()
        served = dist.TCPStore(
            host, port, None, True, timedelta(seconds=50), wait_for_workers=False, master_listen_fd=listener.detach()
        )
    yield host, port
    del served


def end_with_parent() -> None:
    """End this rank at once when the process that started it is gone, or at Ctrl-C, even while it waits for others."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
