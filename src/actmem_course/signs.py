"""Signs of life between hosts: a host that is gone, or cut off, is known by its silence only.

On one host the kernel says at once that a process has ended.  Between hosts nothing arrives any more, and a
rank that waits for another waits until the process group's time is over.  So every rank says twice a
second that it is there; rank 0 misses those that don't, and each rank misses the store if that is silent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from actmem_course.rank_store import RankStore

#: A rank whose thread has said nothing for so long is taken for gone.
ABSENT_SECONDS = 60


class Signs(threading.Thread):
    """This rank's signs to ranks on other hosts; it does nothing where all are on one.

    on_silence: called on this thread with what to say, on one rank of each host, or with None.  It ends the process.
    """

    def __init__(self, on_silence: Callable[[str | None], object]):
        super().__init__(name="signs", daemon=True)
        here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
        self.needed = here is not None and here != everywhere
        self.speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        self._here, self._on_silence = int(here or 1), on_silence
        self._over = threading.Event()
        self._count, self._answered = 0, 0.0
        self._heard: dict[int, tuple[int, float]] = {}

    def exchange(self, store: RankStore) -> str | None:
        """Say that this rank is there.  On rank 0: which rank has been silent for too long, in a sentence."""
        if not self.needed or store.size == 1:
            return None
        self._count += 1
        store.post("sign", self._count)
        silent = self._silent(store) if store.rank == 0 else None
        self._answered = time.monotonic()
        if not self.is_alive():
            self.start()
        return silent

    def _silent(self, store: RankStore) -> str | None:
        for rank in range(self._here, store.size):
            count, now = store.read_if_posted("sign", rank) or 0, time.monotonic()
            if rank not in self._heard or count != self._heard[rank][0]:
                self._heard[rank] = count, now
            elif now - self._heard[rank][1] > ABSENT_SECONDS:
                return f"no sign of rank {rank} for {ABSENT_SECONDS} s: its host, or the network to it, is gone"
        return None

    def run(self) -> None:
        while not self._over.wait(1):
            if time.monotonic() - self._answered > ABSENT_SECONDS:
                first = os.environ.get("MASTER_ADDR")
                text = f"no answer from {first} for {ABSENT_SECONDS} s: that host, or the network to it, is gone"
                self._on_silence(text if self.speaks else None)

    def stop(self) -> None:
        self._over.set()
