"""What a pipeline rank holds after each action: the ledgers of all microbatches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from actmem.measure.ledger import Ledger, record
from actmem.measure.parts import rows_by_term
from actmem.pipeline import Stage, Watcher
from actmem.rows import Row, merge, total
from actmem_course.results import MemorySample

_OUTPUT_REASON = "torch holds a stage's output although the next stage has a copy (appendix B)"
BUFFER_REASON = "torch makes a receive buffer for every microbatch before the first one runs"


class InFlight(Watcher):
    """A watcher for a Pipeline; read ``samples`` and ``peak_rows()`` after the step."""

    def __init__(self) -> None:
        self.samples: list[MemorySample] = []
        self._ledgers: dict[tuple[int, int], list[Ledger]] = {}
        self._stages: dict[int, Stage] = {}
        self._peak: tuple[int, list[Row]] = (-1, [])

    @contextmanager
    def during(self, module: nn.Module, stage: int, microbatch: int) -> Iterator[None]:
        with record(module) as ledger:
            yield
        self._ledgers.setdefault((stage, microbatch), []).append(ledger)

    def after(self, kind: str, stage: Stage, microbatch: int) -> None:
        self._stages[stage.stage_index] = stage
        if kind == "B":
            del self._ledgers[stage.stage_index, microbatch]
        kept = self._kept()
        outputs = sum(self._exclude_shared(kept, s.held_outputs()) for s in self._stages.values())
        buffers = sum(self._exclude_shared(kept, s.receive_buffers()) for s in self._stages.values())
        sample = MemorySample(
            kind, stage.stage_index, microbatch, len(self._ledgers), sum(kept.values()), outputs, buffers
        )
        self.samples.append(sample)
        if sample.kept_bytes >= self._peak[0]:  # the last maximum: the steady state, not the warm-up
            self._peak = sample.kept_bytes, self._rows(sample)

    @property
    def peak_in_flight(self) -> int:
        """The most chunk-microbatches that this rank held at once."""
        return max(sample.in_flight for sample in self.samples)

    def peak_rows(self) -> list[Row]:
        """Rows by term at the moment when the graphs held most, including torch's own tensors."""
        return self._peak[1]

    def _kept(self) -> dict[int, int]:
        """Each storage that a graph in flight keeps, counted once."""
        return {
            key: size
            for ledgers in self._ledgers.values()
            for ledger in ledgers
            for key, size in ledger.storages().items()
        }

    @staticmethod
    def _exclude_shared(kept: dict[int, int], storages: dict[int, int]) -> int:
        return sum(size for key, size in storages.items() if key not in kept)

    def _rows(self, sample: MemorySample) -> list[Row]:
        merged = merge(
            row for ledgers in self._ledgers.values() for ledger in ledgers for row in rows_by_term(ledger.saved)
        )
        assert total(merged) == sample.kept_bytes, "two microbatches share a storage"
        return merged + [
            Row("outputs held by the runtime", sample.output_bytes, extra=_OUTPUT_REASON),
            Row("receive buffers not in use", sample.buffer_bytes, extra=BUFFER_REASON),
        ]
