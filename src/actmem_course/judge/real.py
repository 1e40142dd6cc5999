"""A rank that is a process: what passes on virtual ranks runs here once more, and what is timed runs here only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actmem.measure.comms import count_collectives
from actmem_course.rank_store import RankStore


class RealRank:
    """This process among those of its group (gloo or NCCL); see ``workbench.Side``."""

    def __init__(self, store: RankStore):
        self.store, self.number, self.size = store, store.rank, store.size

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank."""
        return self.store.gather(value)

    @contextmanager
    def watching(self, expected: list[int] | None = None) -> Iterator[count_collectives]:
        """Counts; what must be found out about a learner's exchanges, virtual ranks have found out."""
        with count_collectives() as seen:
            seen.unwaited, seen.unrecorded, seen.groups = [], "", 0
            yield seen
