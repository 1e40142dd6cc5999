"""What one rank keeps for the whole model: its layers, and the two ends of section 4.3, row by row.

Rows are for all microbatches in flight together, at the rank's peak.
``formulas.first_stage`` has the closed forms of the same totals.
"""

from __future__ import annotations

from actmem.config import ModelShape, Parallel, check_divides, check_layer
from actmem.formulas.activations import STATISTICS_REASON, layer_extra_rows, layer_rows
from actmem.formulas.first_stage import embeddings_in_flight, in_flight, layers_per_chunk
from actmem.recipes import Recompute
from actmem.rows import Row

EMBEDDING_TERM = "embedding dropout mask"
HEAD_TERMS = ("final layer-norm input", "output layer input", "logits (float32)")
OUTPUT_TERM = "outputs held by the runtime"

IDS_REASON = "4sb bytes of token numbers; the paper ignores them beside sbh"
OUTPUT_REASON = "a copy of what the next stage already has; appendix B frees it after sending"


def stage_rows(
    shape: ModelShape,
    parallel: Parallel,
    pipeline_rank: int = 0,
    recompute: Recompute | str = "none",
    num_microbatches: int | None = None,
    element_size: int = 2,
    microbatches_per_round: int | None = None,
) -> list[Row]:
    """The paper's terms on one rank: the rows of its layers, then those of the model's ends.

    Pipeline rank 0 has the embedding's dropout mask, sbh/t for each microbatch in flight in the
    first chunk.  Rank p − 1 has the final layer norm's input and the output layer's, 2sbh/t each
    in 16 bits, and the logits, 4sbv/t (8sbv/t where activations are float64): for one
    microbatch, because the last stage runs its backward immediately.  Raises ConfigError if L is
    not divisible by p·m, v by t, or n by p if the schedule is interleaved.  Sections 4.2.3 and 4.3.
    """
    n, g = num_microbatches, microbatches_per_round
    layers = _layers_held(shape, parallel, pipeline_rank, n, g)
    rows = [
        Row(row.term, row.bytes * layers, row.split_by, f"{row.source}, {layers} layer-microbatches")
        for row in layer_rows(shape, parallel, recompute, element_size)
    ]
    return rows + [row for row in _end_rows(shape, parallel, pipeline_rank, n, element_size, "cpu", g) if not row.extra]


def stage_extra_rows(
    shape: ModelShape,
    parallel: Parallel,
    pipeline_rank: int = 0,
    recompute: Recompute | str = "none",
    num_microbatches: int | None = None,
    element_size: int = 2,
    device_type: str = "cpu",
    microbatches_per_round: int | None = None,
) -> list[Row]:
    """What torch keeps on one rank beyond ``stage_rows``, each row with its reason.

    The layers' rows, without the causal mask (all layers share one, made with the model, so it is
    no activation); the token ids and target ids that the two ends keep, and the final layer norm's
    statistics.
    """
    n, g = num_microbatches, microbatches_per_round
    layers = _layers_held(shape, parallel, pipeline_rank, n, g)
    rows = [
        Row(row.term, row.bytes * layers, row.split_by, row.source, row.extra)
        for row in layer_extra_rows(shape, parallel, recompute, element_size, device_type)
        if row.term != "causal mask"
    ]
    ends = _end_rows(shape, parallel, pipeline_rank, n, element_size, device_type, g)
    return rows + [row for row in ends if row.extra]


def _end_rows(
    shape: ModelShape,
    parallel: Parallel,
    pipeline_rank: int,
    num_microbatches: int | None,
    element_size: int,
    device_type: str,
    microbatches_per_round: int | None,
) -> list[Row]:
    """All that the ends of the model on this rank keep."""
    _check_ranks(shape, parallel)
    rows = []
    if pipeline_rank == 0:
        rows += embedding_rows(
            shape, parallel, embeddings_in_flight(parallel, num_microbatches, microbatches_per_round)
        )
    if pipeline_rank == parallel.pipeline_parallel_size - 1:
        rows += output_rows(shape, parallel, element_size, device_type)
    return rows


def embedding_rows(shape: ModelShape, parallel: Parallel, num_microbatches: int = 1) -> list[Row]:
    """What the embedding keeps of its microbatches: its dropout mask, sbh/t each, and the token ids.  Section 4.3."""
    _check_ranks(shape, parallel)
    _, b, h, s = shape.letters()
    n, whole = num_microbatches, parallel.sequence_parts
    return [
        Row(EMBEDDING_TERM, n * s * b * h // whole, whole, f"§4.3, {n} microbatches"),
        Row("token ids", n * 4 * s * b, 1, "embedding", IDS_REASON),
    ]


def output_rows(shape: ModelShape, parallel: Parallel, element_size: int = 2, device_type: str = "cpu") -> list[Row]:
    """What the final layer norm, the output layer and the loss keep of one microbatch.  Section 4.3."""
    _check_ranks(shape, parallel)
    _, b, h, s = shape.letters()
    v, e, t, whole = shape.vocab_size, element_size, parallel.tensor_parallel_size, parallel.sequence_parts
    norm_input, output_input, logits = HEAD_TERMS
    statistic = max(e, 4) if device_type == "cuda" else e
    return [
        Row(norm_input, e * s * b * h // whole, whole, "§4.3, layer norm"),
        Row(output_input, e * s * b * h // whole, whole, "§4.3, output layer"),
        Row(logits, max(e, 4) * s * b * v // t, t, "§4.3, cross entropy"),
        Row("final layer-norm statistics", 2 * s * b * statistic // whole, whole, "layer norm", STATISTICS_REASON),
        Row("target ids", 4 * s * b, 1, "cross entropy", IDS_REASON),
    ]


def stage_output_rows(
    shape: ModelShape,
    parallel: Parallel,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    element_size: int = 2,
    microbatches_per_round: int | None = None,
) -> list[Row]:
    """Outputs of this rank's chunks, which stay until their backward unless they are freed.

    2sbh/t in 16 bits for each chunk-microbatch in flight, or 2sbh without sequence parallelism;
    none for the last chunk of the model, whose output isn't sent.
    Source: appendix B, whose 2sbhr is not divided by t.
    """
    check_layer(shape, parallel)
    count = in_flight(parallel, pipeline_rank, num_microbatches, microbatches_per_round)
    if pipeline_rank == parallel.pipeline_parallel_size - 1:
        count -= 1  # the one microbatch in the last chunk
    _, b, h, s = shape.letters()
    whole = parallel.sequence_parts
    size = count * element_size * s * b * h // whole
    return [Row(OUTPUT_TERM, size, whole, f"appendix B, {count} outputs", OUTPUT_REASON)] if count else []


def _check_ranks(shape: ModelShape, parallel: Parallel) -> None:
    check_layer(shape, parallel)
    check_divides("vocab_size", shape.vocab_size, "tensor_parallel_size", parallel.tensor_parallel_size)


def _layers_held(shape: ModelShape, parallel: Parallel, pipeline_rank: int, n: int | None, g: int | None) -> int:
    """Layers × microbatches in flight on this rank."""
    return in_flight(parallel, pipeline_rank, n, g) * layers_per_chunk(shape, parallel)


def bytes_by_rank(
    shape: ModelShape,
    parallel: Parallel,
    recompute: Recompute | str = "none",
    num_microbatches: int | None = None,
    element_size: int = 2,
    free_outputs: bool = True,
) -> list[int]:
    """Bytes of ``stage_rows`` on every pipeline rank, with or without the outputs.  Figure 9."""
    totals = []
    for rank in range(parallel.pipeline_parallel_size):
        rows = stage_rows(shape, parallel, rank, recompute, num_microbatches, element_size)
        if not free_outputs:
            rows += stage_output_rows(shape, parallel, rank, num_microbatches, element_size)
        totals.append(sum(row.bytes for row in rows))
    return totals
