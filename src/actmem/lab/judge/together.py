"""How ranks talk about the judging: through a store of their own, never through the group that is judged.

A learner's collectives may be mismatched, and then nothing that runs over the same process group
can be trusted.  A TCPStore is only keys and values, and stays usable whatever the ranks did.
"""

from __future__ import annotations

import os
import pickle
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

#: How long a rank waits for the others' word.  The watchdog, where there is one, speaks earlier.
SECONDS = 50


class RanksLost(Exception):
    """Rank 0, which serves the store, is gone.  The watchdog says so and ends the process."""


class Together:
    """All ranks, seen from one.  Every rank must make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size, self.store = rank, size, store
        self._calls = 0

    def gather(self, value: object) -> list:
        """Every rank's ``value``, in the order of the ranks; anything that can be pickled."""
        self._calls += 1
        return self.exchange(f"gather/{self._calls}", value)

    def exchange(self, key: str, value: object) -> list:
        """The same under a key of the caller's, which may be used once."""
        if self.size == 1:
            return [value]
        self.post(key, value)
        return [self.read(key, rank) for rank in range(self.size)]

    def post(self, key: str, value: object) -> None:
        """Say ``value`` under ``key`` and go on."""
        if self.size > 1:
            with _lost():
                self.store.set(f"{key}/{self.rank}", pickle.dumps(value))

    def read(self, key: str, rank: int) -> object:
        """What ``rank`` said under ``key``, once it has.  Our own ranks wrote it, so it is safe to unpickle."""
        with _lost():
            return pickle.loads(self.store.get(f"{key}/{rank}"))

    def heard(self, key: str, rank: int) -> object | None:
        """What ``rank`` said under ``key``, or None if it has not."""
        with _lost():
            there = self.store is not None and self.store.check([f"{key}/{rank}"])
        return self.read(key, rank) if there else None


@contextmanager
def _lost():
    try:
        yield
    except dist.DistError as error:
        raise RanksLost(str(error).partition("\n")[0]) from None


def join() -> Together:
    """Make the ranks' own store.  Every rank of the default process group must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Together()
    rank, size = dist.get_rank(), dist.get_world_size()
    server = _store("127.0.0.1", 0, leader=True) if rank == 0 else None
    address = [(os.environ.get("MASTER_ADDR", "127.0.0.1"), server.port) if server else None]
    dist.broadcast_object_list(address, src=0)
    together = Together(rank, size, server or _store(*address[0]))
    together.address = (("127.0.0.1" if server else address[0][0]), address[0][1])
    return together


def second_line(together: Together) -> Together:
    """Another connection to the same store, for another thread: one that waits blocks its connection."""
    if together.size == 1:
        return Together()
    return Together(together.rank, together.size, _store(*together.address))


def _store(host: str, port: int, leader: bool = False) -> dist.TCPStore:
    return dist.TCPStore(host, port, None, leader, timeout=timedelta(seconds=SECONDS), wait_for_workers=False)
