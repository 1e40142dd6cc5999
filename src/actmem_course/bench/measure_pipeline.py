"""Measure one step of the pipeline: every rank's bytes, predicted and counted, and its memory curve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actmem.config import ConfigError, ModelShape, Parallel, check_layer, check_vocab_size
from actmem.formulas.first_stage import bytes_by_rank, in_flight, stage_extra_rows, stage_rows
from actmem.formulas.schedule import Schedule, interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.formulas.states import parameter_counts
from actmem.pipeline import Pipeline, check_pipeline, make_mesh
from actmem.rows import compare, extra_rows, paper_rows, total
from actmem_course.bench.held import InFlight
from actmem_course.bench.timing import check_fits
from actmem_course.results import PipelineResult


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
    predicted = stage_rows(*place, microbatches_per_round=plan.per_round)
    extra = stage_extra_rows(*place, device_type=device, microbatches_per_round=plan.per_round)
    rows = watcher.peak_rows()
    measured = paper_rows(rows)  # what torch's runtime holds besides the graphs is marked as extra
    output_bytes, buffer_bytes = (row.bytes for row in extra_rows(rows))
    comparison = compare(predicted + extra, measured)
    order = [(a.kind, a.chunk * p + a.rank, a.microbatch) for a in plan.schedule[stage]]
    return PipelineResult(
        rank=rank,
        pipeline_rank=stage,
        predicted_in_flight=in_flight(parallel, stage, plan.num_microbatches, plan.per_round),
        measured_in_flight=watcher.peak_in_flight,
        predicted_bytes=total(predicted),
        extra_bytes=total(extra),
        measured_bytes=total(measured),
        difference_bytes=total(measured) - total(predicted) - total(extra),
        output_bytes=output_bytes,
        buffer_bytes=buffer_bytes,
        exact=comparison.exact,
        disagreement="" if comparison.exact else comparison.describe(),
        order_as_drawn=[(s.kind, s.stage, s.microbatch) for s in watcher.samples] == order,
        samples=watcher.samples,
    )
