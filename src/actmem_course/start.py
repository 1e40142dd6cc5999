"""Ranks on this machine without torchrun, under one parent that knows what becomes of each.

The parent serves the store where the ranks meet, on this machine only.  It holds a line to every
rank: a rank says on it that it has come to its end, and hears on it that the parent is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from actmem_course.guard import LINE, say
from actmem_course.launch import Ended, ending_raises, loopback_listener, rank_environment

#: How long ranks that are told to end may take: one may have a verdict to print.
GRACE_SECONDS = 8


@dataclass
class Rank:
    """One rank's process, and the parent's end of the line to it."""

    number: int
    process: subprocess.Popen
    line: socket.socket

    def state(self) -> str:
        """ "runs", "done", or how it ended before its end."""
        code = self.process.poll()
        if code is None:
            return "runs"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        if code:
            return "failed"  # it has said why
        with self.line.dup() as line:
            line.setblocking(False)
            try:
                return "done" if line.recv(1, socket.MSG_PEEK) else "ended without a word"
            except OSError:
                return "ended without a word"


def start_ranks(script: str, arguments: list[str], size: int) -> int:
    """Run ``script`` as ``size`` ranks and return the exit code: 0 if all came to their end with 0.

    When a rank ends in another way, the others are told to end, as torchrun does.
    """
    program = os.path.basename(script)
    with ending_raises(), served_store() as address:
        ranks = [_start(script, arguments, size, number, address) for number in range(size)]
        try:
            while all(rank.state() in ("runs", "done") for rank in ranks) and any(r.state() == "runs" for r in ranks):
                time.sleep(0.05)
            failed = _end(ranks)
        except KeyboardInterrupt:
            _end(ranks)
            return 130
        except Ended as ended:
            _end(ranks)
            say(f"{program}: ended by {signal.Signals(ended.args[0]).name}")
            return 128 + ended.args[0]
    if failed and failed[0].state() != "failed":
        say(f"{program}: rank {failed[0].number} {failed[0].state()}")
    code = ranks[0].process.returncode
    return code if code in (1, 2, 130) else 1 if failed else code


def _start(script: str, arguments: list[str], size: int, number: int, address: tuple[str, int]) -> Rank:
    ours, theirs = socket.socketpair()
    environment = rank_environment(number, size, address) | {LINE: str(theirs.fileno())}
    command = [sys.executable, script, *arguments]
    with theirs:
        return Rank(number, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]), ours)


def _end(ranks: list[Rank]) -> list[Rank]:
    """End what still runs; the ranks that failed by themselves, the likeliest cause first."""
    states = [rank.state() for rank in ranks]  # asked once: a rank that ends in between would be in neither list
    failed = [rank for rank, state in zip(ranks, states) if state not in ("runs", "done")]
    told = [rank for rank, state in zip(ranks, states) if state == "runs"]
    for rank in told:
        rank.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(rank.state() == "runs" for rank in told) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in told:
        if rank.state() == "runs":
            rank.process.kill()
        rank.process.wait()
        if rank.state() == "failed":
            failed.append(rank)
    return sorted(failed, key=lambda rank: ("failed", "was ended", "ended without").index(_kind(rank)))


def _kind(rank: Rank) -> str:
    return " ".join(rank.state().split()[:2])


@contextmanager
def served_store() -> Iterator[tuple[str, int]]:
    """A store for the ranks, which nobody on another machine can reach."""
    with loopback_listener() as listener:
        host, port = listener.getsockname()
        served = dist.TCPStore(
            host, port, None, True, timedelta(seconds=50), wait_for_workers=False, master_listen_fd=listener.detach()
        )
    yield host, port
    del served
