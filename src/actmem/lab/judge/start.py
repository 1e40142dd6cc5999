"""Ranks on this machine without torchrun: the same environment, and no report of its own after ours."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time


def start_ranks(script: str, arguments: list[str], size: int) -> int:
    """Run ``script`` as ``size`` ranks and return rank 0's exit code; 1 if it died.

    When a rank ends with an error, the others are told to end, as torchrun does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The store's C++ side writes pages when a rank is gone; the watchdog says it in a line.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **shared}
    processes = [
        subprocess.Popen([sys.executable, script, *arguments], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        while all(process.poll() in (None, 0) for process in processes) and any(p.poll() is None for p in processes):
            time.sleep(0.05)
    except KeyboardInterrupt:
        pass  # the ranks have had it too
    _end([process for process in processes if process.poll() is None])
    code = processes[0].returncode
    if code < 0:
        print(f"rank 0 was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return code if code in (0, 1, 2, 130) else 1


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=20)  # a rank that is left may have the verdict to print
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
