"""How ranks talk beside their process group: through the store where they met.

A learner's collectives may be mismatched, and then nothing that runs over the same process group
can be trusted.  A store is only keys and values, and stays usable whatever the ranks did.  It is
served by what started the ranks (torchrun, or ``start_ranks``), so it outlives each of them.

A message is values, never code.  A pickle runs what its writer likes, and whoever can reach a store could write one; so
what comes out of it is read by ``torch.load(weights_only=True)``, which makes nothing but values, tensors and
``MESSAGE_KINDS``.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

#: Classes that may be made from a message, beside what ``torch.load`` makes without running code.
MESSAGE_KINDS: list = [set, frozenset]


class BadMessage(ValueError):
    """What was read is no message of ours."""


def encoded(value: object) -> bytes:
    """``value`` as ``torch.save`` writes it."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def decoded(message: bytes) -> Any:
    """The value that ``encoded`` was given, on this rank's own GPU if it was on one.  Raises BadMessage on anything else."""
    try:
        with torch.serialization.safe_globals(MESSAGE_KINDS):
            return torch.load(io.BytesIO(message), map_location=_own_device, weights_only=True)
    except Exception as error:
        raise BadMessage(f"no message of ours: {type(error).__name__}") from None


def _own_device(storage: Any, place: str) -> Any:
    return storage.cuda() if place.startswith("cuda") else storage


#: How long a judged rank waits for the others' word.  The watchdog, where there is one, speaks earlier.
SECONDS = 50


class RanksLost(Exception):
    """The store is gone, or another rank has not said what this one waits for."""


class RankStore:
    """All ranks, seen from one.  Every rank must make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size = rank, size
        self.store: Any = store  # torch types its values as text; they are bytes
        self._calls = 0
        #: What its user makes once for all ranks, such as process groups.
        self.kept: dict[str, Any] = {}

    def gather(self, value: object) -> list:
        """Every rank's ``value``, in the order of the ranks; anything that ``encoded`` takes."""
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
                self.store.set(f"{key}/{self.rank}", encoded(value))

    def read(self, key: str, rank: int) -> Any:
        """What ``rank`` said under ``key``, once it has."""
        with _lost():
            return decoded(self.store.get(f"{key}/{rank}"))

    def read_if_posted(self, key: str, rank: int) -> Any:
        """What ``rank`` said under ``key``, or None if it has not."""
        with _lost():
            there = self.store is not None and self.store.check([f"{key}/{rank}"])
        return self.read(key, rank) if there else None

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number that all ranks share, from 0 on; what it is then."""
        with _lost():
            return self.store.add(key, more) if self.store is not None else more


@contextmanager
def _lost():
    try:
        yield
    except dist.DistError as error:
        raise RanksLost(str(error).partition("\n")[0]) from None


def connect(purpose: str, seconds: float = SECONDS) -> RankStore:
    """A connection of one's own to the store; one that waits blocks all of its connection.

    Every rank must have one for each purpose, and each purpose has keys of its own.  Before there is a
    process group, ranks are those of the environment.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return RankStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankStore(rank, size, dist.PrefixStore(f"actmem/{attempt}/{purpose}", store))
