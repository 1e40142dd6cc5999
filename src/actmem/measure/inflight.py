"""What a pipeline rank holds, action by action: the ledger of every microbatch in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from actmem.measure.ledger import Ledger, record
from actmem.measure.terms import rows_by_term
from actmem.pipeline import Stage, Watcher
from actmem.rows import Row, merge, total

OUTPUT_REASON = "torch holds a stage's output although the next stage has a copy (appendix B)"
BUFFER_REASON = "torch makes a receive buffer for every microbatch before the first one runs"


@dataclass(frozen=True)
class Sample:
    """What this rank held right after one action.

    kind: "F" or "B".  in_flight: chunk-microbatches whose forward is done and backward is not.
    kept_bytes: held by graphs.  output_bytes, buffer_bytes: held by torch's runtime beside that.
    """

    kind: str
    stage: int
    microbatch: int
    in_flight: int
    kept_bytes: int
    output_bytes: int
    buffer_bytes: int


class InFlight(Watcher):
    """Give one to a Pipeline as its watcher; read ``samples`` and ``peak_rows()`` after the step."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
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
        outputs = sum(self._beside(kept, s.held_outputs()) for s in self._stages.values())
        buffers = sum(self._beside(kept, s.receive_buffers()) for s in self._stages.values())
        sample = Sample(
            kind, stage.stage_index, microbatch, len(self._ledgers), sum(kept.values()), outputs, buffers
        )
        self.samples.append(sample)
        if sample.kept_bytes >= self._peak[0]:  # the last such moment: the steady state, not the warm-up
            self._peak = sample.kept_bytes, self._rows(sample)

    @property
    def peak_in_flight(self) -> int:
        """The most chunk-microbatches that this rank held at once."""
        return max(sample.in_flight for sample in self.samples)

    def peak_rows(self) -> list[Row]:
        """Rows by term at the moment when the graphs held most, torch's own tensors included."""
        return self._peak[1]

    def _kept(self) -> dict[int, int]:
        """Every storage that some graph in flight keeps, once."""
        return {key: size for ledgers in self._ledgers.values() for ledger in ledgers for key, size in ledger.storages().items()}

    @staticmethod
    def _beside(kept: dict[int, int], storages: dict[int, int]) -> int:
        return sum(size for key, size in storages.items() if key not in kept)

    def _rows(self, sample: Sample) -> list[Row]:
        merged = merge(row for ledgers in self._ledgers.values() for ledger in ledgers for row in rows_by_term(ledger.saved))
        assert total(merged) == sample.kept_bytes, "two microbatches share a storage"
        return merged + [
            Row("outputs held by the runtime", sample.output_bytes, extra=OUTPUT_REASON),
            Row("receive buffers not in use", sample.buffer_bytes, extra=BUFFER_REASON),
        ]
