"""Measure one step of the pipeline: every rank's bytes, predicted and counted, and its memory curve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from actmem.config import ConfigError, ModelShape, Parallel, check_layer, check_vocab_size
from actmem.formulas.first_stage import bytes_by_rank, in_flight, stage_rows
from actmem.formulas.schedule import Schedule, interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.formulas.states import parameter_counts
from actmem.ledger.parts import rows_by_term
from actmem.ledger.recorder import Ledger, record
from actmem.pipeline import Pipeline, Stage, Watcher, check_pipeline, make_mesh
from actmem.rows import Row, compare, extra_rows, merge, paper_rows, total
from actmem_course.bench.timing import check_fits
from actmem_course.results import MemorySample, PipelineResult


@dataclass(frozen=True)
class PipelineRun:
    """One run: the model, the grid of ranks, the microbatches."""

    shape: ModelShape
    parallel: Parallel
    num_microbatches: int
    recompute: str = "none"
    free_outputs: bool = False

    def check(self, num_ranks: int) -> None:
        """Raise ConfigError if this plan cannot run on ``num_ranks`` ranks."""
        t, p, m = self._sizes
        if p * t != num_ranks:
            raise ConfigError("pipeline", f"p · t = {p} · {t} = {p * t} ranks wanted, {num_ranks} started")
        check_layer(self.shape, self.parallel)
        check_pipeline(self.shape, p, m, self.num_microbatches, self.free_outputs)
        check_vocab_size(self.shape.vocab_size, t)
        _ = self.schedule  # too long for one is refused here

    def check_memory(self, element_size: int, ranks_here: int, memory_bytes: int) -> None:
        """Raise ConfigError if ``ranks_here`` ranks can't hold their parts at once, each as much as the fullest.

        Weights and their gradients, all that forward keeps, two score tensors and two of logits that come and go.
        """
        a, b, _, s = self.shape.letters()
        t, p, _ = self._sizes
        passing = 2 * element_size * a * s * s * b // t + 8 * s * b * self.shape.vocab_size // t
        passing += 16 * self.num_microbatches * b * s  # the batch's tokens and targets
        kept = bytes_by_rank(
            self.shape, self.parallel, self.recompute, self.num_microbatches, element_size, self.free_outputs
        )
        weights = [2 * element_size * sum(parameter_counts(self.shape, self.parallel, r).values()) for r in range(p)]
        check_fits(passing + max(map(sum, zip(weights, kept))), ranks_here, memory_bytes)

    @property
    def schedule(self) -> Schedule:
        """The order of actions that torch will run."""
        _, p, m = self._sizes
        if m == 1:
            return one_forward_one_backward(p, self.num_microbatches)
        return interleaved(p, m, self.num_microbatches, self.per_round)

    @property
    def per_round(self) -> int | None:
        """Microbatches that pass one chunk before the next chunk's turn; None for 1F1B."""
        _, p, m = self._sizes
        return torch_microbatches_per_round(p, self.num_microbatches) if m > 1 else None

    @property
    def _sizes(self) -> tuple[int, int, int]:
        parallel = self.parallel
        return parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks


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


def measure_pipeline(plan: PipelineRun, rank: int, device: str, dtype: torch.dtype) -> PipelineResult:
    """This rank's result of one forward and backward of all microbatches.  Every rank must call it."""
    shape, parallel = plan.shape, plan.parallel
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    watcher = InFlight()
    pipeline = Pipeline(
        shape,
        make_mesh(device, p, t),
        num_microbatches=plan.num_microbatches,
        num_model_chunks=m,
        sequence_parallel=parallel.sequence_parallel,
        free_outputs=plan.free_outputs,
        watcher=watcher,
        recompute=plan.recompute,
        device=device,
        dtype=dtype,
    )
    batch = (plan.num_microbatches * shape.micro_batch_size, shape.seq_length)
    tokens = torch.randint(0, shape.vocab_size, batch, device=device)
    pipeline.step(tokens, tokens.roll(-1, 1))

    stage = rank // t
    place = (shape, parallel, stage, plan.recompute, plan.num_microbatches, dtype.itemsize)
    predicted = stage_rows(*place, device_type=device, microbatches_per_round=plan.per_round)
    rows = watcher.peak_rows()
    measured = paper_rows(rows)  # what torch's runtime holds besides the graphs is marked as extra
    output_bytes, buffer_bytes = (row.bytes for row in extra_rows(rows))
    comparison = compare(predicted, measured)
    order = [(a.kind, a.chunk * p + a.rank, a.microbatch) for a in plan.schedule[stage]]
    return PipelineResult(
        rank=rank,
        pipeline_rank=stage,
        predicted_in_flight=in_flight(parallel, stage, plan.num_microbatches, plan.per_round),
        measured_in_flight=watcher.peak_in_flight,
        predicted_bytes=total(paper_rows(predicted)),
        extra_bytes=total(extra_rows(predicted)),
        measured_bytes=total(measured),
        difference_bytes=comparison.difference,
        output_bytes=output_bytes,
        buffer_bytes=buffer_bytes,
        exact=comparison.exact,
        disagreement="" if comparison.exact else comparison.describe(),
        order_as_drawn=[(s.kind, s.stage, s.microbatch) for s in watcher.samples] == order,
        samples=watcher.samples,
    )
