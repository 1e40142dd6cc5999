"""Activation bytes with pipeline parallelism: equations 5 and 6, the interleave factor, section 4.3.

A microbatch is in flight on a rank between its forward and its backward pass there.  First come the closed forms, then
the same totals as rows: what one rank saves for its layers, the embedding and the loss at its peak, for all
microbatches in flight.  ``actmem.formulas.schedule`` counts a third time, from the order in which a schedule runs its
passes.  Each of the three checks the others.  Every byte count is an exact integer.
"""

from dataclasses import replace
from fractions import Fraction

from actmem.config import (
    ConfigError,
    ModelShape,
    Parallel,
    check_divides,
    check_layer,
    check_size,
    check_sizes,
    check_vocab_size,
)
from actmem.formulas.activations import eq4, layer_bytes, layer_extra_rows, layer_rows, statistics_row
from actmem.formulas.schedule import round_size
from actmem.recipes import Recompute
from actmem.rows import Row, paper_rows, total

EMBEDDING_TERM = "embedding dropout mask"
HEAD_TERMS = ("final layer-norm input", "output layer input", "logits (float32)")

IDS_REASON = "4sb bytes of token numbers; the paper ignores them beside sbh"
OUTPUT_REASON = "a copy of what the next stage already has; appendix B frees it after sending"


def eq5(shape: ModelShape, tensor_parallel_size: int) -> int:
    """Predict the activation bytes of the first stage's layers: (sbhL/t)(34 + 5as/h) in 16 bits, whatever p is.

    Stage 0 holds p microbatches of L/p layers each, so p cancels.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        tensor_parallel_size: t, with sequence parallelism.

    Source: 2205.05198 eq. 5.
    """
    return eq4(shape, tensor_parallel_size) * shape.num_layers


def eq6(shape: ModelShape, tensor_parallel_size: int) -> int:
    """Predict the activation bytes of the first stage's layers with selective recomputation: 34sbhL/t in 16 bits.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        tensor_parallel_size: t, with sequence parallelism.

    Source: 2205.05198 eq. 6.
    """
    return layer_bytes(shape, Parallel(tensor_parallel_size, True), "selective") * shape.num_layers


def selective_saves(shape: ModelShape) -> Fraction:
    """Return by which share selective recomputation cuts a layer's saved bytes: (5as/h)/(34 + 5as/h), in 16 bits.

    Source: 2205.05198 section 5.
    """
    return 1 - Fraction(layer_bytes(shape, recompute="selective"), layer_bytes(shape))


def interleave_factor(pipeline_parallel_size: int, num_model_chunks: int) -> Fraction:
    """Return the factor by which interleaving raises the first stage's bytes: 1 + (p − 1)/(pm), or 1 for m = 1.

    With m = 1 the paper means plain 1F1B, not interleaving with one chunk.

    Args:
        pipeline_parallel_size: p.
        num_model_chunks: m, model chunks on each pipeline rank.

    Source: 2205.05198 section 4.2.3.
    """
    p, m = pipeline_parallel_size, num_model_chunks
    check_sizes(pipeline_parallel_size=p, num_model_chunks=m)
    return Fraction(p * m + p - 1, p * m) if m > 1 else Fraction(1)


def layers_per_chunk(shape: ModelShape, parallel: Parallel) -> int:
    """Return the number of layers in one model chunk, L/(pm); raise ConfigError if p·m does not divide L."""
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    name = "pipeline_parallel_size" if m == 1 else "pipeline_parallel_size · num_model_chunks"
    return check_divides("num_layers", shape.num_layers, name, p * m)


def in_flight(
    parallel: Parallel,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    microbatches_per_round: int | None = None,
) -> int:
    """Return the most microbatches that a rank holds at once between their forward and their backward pass.

    A microbatch counts once for each of the rank's chunks in which it is in flight (a chunk-microbatch). 1F1B:
    min(p − r, n). Interleaved: min((m − 1)g + 2(p − 1 − r) + 1, nm), which is pm + p − 1 on rank 0 for g = p.

    Args:
        parallel: how the ranks share the model; only p and m are read.
        pipeline_rank: r, from 0 to p − 1.
        num_microbatches: n, microbatches of one step; None: enough to fill the pipeline.
        microbatches_per_round: g, how many go through one chunk before the rank turns to its next chunk. None: p, as
            in Megatron; torch's g is ``schedule.torch_microbatches_per_round``.
    """
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    check_size("pipeline_rank", pipeline_rank, p - 1, least=0)
    if num_microbatches is not None:
        check_size("num_microbatches", num_microbatches)
    g = round_size(p, m, num_microbatches if m > 1 else None, microbatches_per_round)
    most = p - pipeline_rank if m == 1 else (m - 1) * g + 2 * (p - 1 - pipeline_rank) + 1
    return most if num_microbatches is None else min(most, num_microbatches * m)


def embeddings_in_flight(
    parallel: Parallel, num_microbatches: int | None = None, microbatches_per_round: int | None = None
) -> int:
    """Return for how many microbatches rank 0 holds the embedding's activations at its peak.

    1F1B: min(p, n), the p of section 4.3. Interleaved: min(2g, n), because a second round of forwards enters the first
    chunk, which has the embedding, before any backward reaches that chunk. For g = p − 1 the third round's first
    forward enters too: 2p − 1. With two chunks and g >= 2p backwards reach the chunk before the second round has
    entered: g + 2p − 1.

    Args:
        parallel: how the ranks share the model; only p and m are read.
        num_microbatches: n, microbatches of one step; None: enough to fill the pipeline.
        microbatches_per_round: g, how many go through one chunk before the rank turns to its next chunk. None: p.
    """
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    if m == 1:
        return in_flight(parallel, 0, num_microbatches)
    g = round_size(p, m, num_microbatches, microbatches_per_round)
    most = max(2 * p - 1, 2 * g if m > 2 else min(2 * g, g + 2 * p - 1))
    return most if num_microbatches is None else min(most, num_microbatches)


def section43_extras(shape: ModelShape, tensor_parallel_size: int, pipeline_parallel_size: int) -> int:
    """Return the bytes that section 4.3 adds to equation 5, as printed: (sbhL/t)(p/L + δ(p=1)(4/L)(1 + v/h)).

    They are those of the embedding and, with p = 1, of the final norm, the output layer and the loss. The formula is
    for 16-bit activations, float32 logits and sequence parallelism. It counts p embedding masks even when interleaved;
    ``embeddings_in_flight`` has the number that the interleaved order really holds.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        tensor_parallel_size: t.
        pipeline_parallel_size: p.
    """
    check_layer(shape, Parallel(tensor_parallel_size, sequence_parallel=True))
    _, b, h, s = shape.letters()
    t, p, v = tensor_parallel_size, check_size("pipeline_parallel_size", pipeline_parallel_size), shape.vocab_size
    check_vocab_size(v, t)
    ends = (4 * s * b * h + 4 * s * b * v) // t if p == 1 else 0
    return s * b * h * p // t + ends


def bubble_fraction(parallel: Parallel, num_microbatches: int) -> Fraction:
    """Return a rank's idle time in one step divided by its working time: (p − 1)/(nm), if sends take no time.

    Args:
        parallel: how the ranks share the model; only p and m are read.
        num_microbatches: n, microbatches of one step.

    Source: 2104.04473.
    """
    n = check_size("num_microbatches", num_microbatches)
    return Fraction(parallel.pipeline_parallel_size - 1, n * parallel.num_model_chunks)


def check_stage(shape: ModelShape, parallel: Parallel, pipeline_rank: int = 0, element_size: int = 2) -> None:
    """Raise ConfigError if t ranks can't share a layer or the vocabulary, or if pipeline_rank isn't from 0 to p − 1."""
    check_layer(shape, parallel, element_size)
    check_vocab_size(shape.vocab_size, parallel.tensor_parallel_size)
    check_size("pipeline_rank", pipeline_rank, parallel.pipeline_parallel_size - 1, least=0)


def stage_rows(
    shape: ModelShape,
    parallel: Parallel,
    pipeline_rank: int = 0,
    recompute: Recompute | str = "none",
    num_microbatches: int | None = None,
    element_size: int = 2,
    device_type: str = "cpu",
    microbatches_per_round: int | None = None,
) -> list[Row]:
    """List what one pipeline rank saves for backward at its peak, for all microbatches in flight together.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        parallel: how the ranks share the model; t, ``sequence_parallel``, p and m are read.
        pipeline_rank: r, from 0, the first stage, to p − 1.  Rank 0 has the embedding's rows too, the last rank those
            of the final layer norm, the output layer and the loss.
        recompute: a mode of recomputation, or its name, such as "selective".
        num_microbatches: n, microbatches of one step; None: enough to fill the pipeline.
        element_size: bytes of an activation element.
        device_type: "cpu" or "cuda", on which the bytes of statistics and random-number states depend.
        microbatches_per_round: g, how many go through one chunk before the rank turns to its next chunk. None: p.

    Returns: rows. ``rows.paper_rows`` picks those that the paper counts. The rows that it doesn't count are those of
        ``layer_extra_rows`` (statistics, random-number states), the token ids and target ids that embedding and loss
        save, and the final layer norm's statistics. The causal mask is not listed: the model makes one for all layers
        and steps, so it is no activation. The last rank has the logits of one microbatch, because the last stage runs
        each backward immediately.
    Raises: ConfigError if p·m does not divide L, t does not divide v, or p does not divide n in an interleaved
        schedule.
    Source: 2205.05198 sections 4.2.3 and 4.3.
    """
    check_stage(shape, parallel, pipeline_rank)
    n, g = num_microbatches, microbatches_per_round
    layers = in_flight(parallel, pipeline_rank, n, g) * layers_per_chunk(shape, parallel)
    of_layer = layer_rows(shape, parallel, recompute, element_size)
    of_layer += layer_extra_rows(shape, parallel, recompute, element_size, device_type)
    rows = [
        replace(row, bytes=row.bytes * layers, source=f"{row.source}, {layers} layer-microbatches")
        for row in of_layer
        if row.term != "causal mask"
    ]
    if pipeline_rank == 0:
        rows += embedding_rows(shape, parallel, embeddings_in_flight(parallel, n, g))
    if pipeline_rank == parallel.pipeline_parallel_size - 1:
        rows += output_rows(shape, parallel, element_size, device_type)
    return rows


def embedding_rows(shape: ModelShape, parallel: Parallel, num_microbatches: int = 1) -> list[Row]:
    """List what the embedding saves for backward: for each microbatch a dropout mask and the token ids.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        parallel: how the ranks share the model; ``sequence_parallel`` and t are read.
        num_microbatches: how many microbatches are in flight.

    Returns: a row for all masks, sbh bytes each (sbh/t under sequence parallelism), and one for all ids, 4sb each.
    Source: 2205.05198 section 4.3.
    """
    check_stage(shape, parallel)
    _, b, h, s = shape.letters()
    n, cut = check_size("num_microbatches", num_microbatches), parallel.sequence_parts
    return [
        Row(EMBEDDING_TERM, n * s * b * h // cut, cut, f"§4.3, {n} microbatches"),
        Row("token ids", n * 4 * s * b, 1, "embedding", IDS_REASON),
    ]


def output_rows(shape: ModelShape, parallel: Parallel, element_size: int = 2, device_type: str = "cpu") -> list[Row]:
    """List what the final layer norm, the output layer and the loss save for backward of one microbatch.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        parallel: how the ranks share the model; t and ``sequence_parallel`` are read.
        element_size: bytes of an activation element. The logits have at least 4 bytes an element.
        device_type: "cpu" or "cuda", on which the bytes of the norm's statistics depend.

    Source: 2205.05198 section 4.3.
    """
    check_stage(shape, parallel, element_size=element_size)
    _, b, h, s = shape.letters()
    v, e, t, cut = shape.vocab_size, element_size, parallel.tensor_parallel_size, parallel.sequence_parts
    norm_input, output_input, logits = HEAD_TERMS
    return [
        Row(norm_input, e * s * b * h // cut, cut, "§4.3, layer norm"),
        Row(output_input, e * s * b * h // cut, cut, "§4.3, output layer"),
        Row(logits, max(e, 4) * s * b * v // t, t, "§4.3, cross entropy"),
        statistics_row("final layer-norm statistics", shape, parallel, e, device_type),
        Row("target ids", 4 * s * b, 1, "cross entropy", IDS_REASON),
    ]


def stage_output_rows(
    shape: ModelShape,
    parallel: Parallel,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    element_size: int = 2,
) -> list[Row]:
    """List the outputs that a rank has sent to the next stage and still holds, if the runtime doesn't free them.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        parallel: how the ranks share the model; t, ``sequence_parallel``, p and m are read.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.
        num_microbatches: microbatches of one step; None: enough to fill the pipeline.
        element_size: bytes of an activation element.

    Returns: one row, or none. In 16 bits it has 2sbh bytes, or 2sbh/t under sequence parallelism, for each microbatch
        in flight in each chunk. The last chunk of the model adds none: its output isn't sent.
    Source: 2205.05198 appendix B, which prints 2sbhr without the division by t.
    """
    check_layer(shape, parallel, element_size)
    count = in_flight(parallel, pipeline_rank, num_microbatches)
    if pipeline_rank == parallel.pipeline_parallel_size - 1:
        count -= 1  # the one microbatch in the last chunk
    _, b, h, s = shape.letters()
    cut = parallel.sequence_parts
    size = count * element_size * s * b * h // cut
    row = Row("outputs held by the runtime", size, cut, f"appendix B, {count} outputs", OUTPUT_REASON)
    return [row] if count else []


def capacity(
    shape: ModelShape,
    parallel: Parallel,
    budget_bytes: int,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    recompute: Recompute | str = "selective",
) -> int:
    """Return how many of a rank's microbatches in flight can save everything, if all other ones are recomputed.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        parallel: how the ranks share the model; t, ``sequence_parallel``, p and m are read.
        budget_bytes: bytes for all activations that the paper counts: the rank's layers and, on the first and last
            rank, the embedding and the loss.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.
        num_microbatches: microbatches of one step; None: enough to fill the pipeline.
        recompute: the mode, such as "selective", in which all other microbatches are recomputed.

    Returns: from 0 to ``in_flight``, which counts a microbatch once for each chunk.
    Raises: ConfigError if the microbatches don't fit even when all are recomputed.
    Source: 2205.05198 appendix C.
    """
    recompute = Recompute.of(recompute)
    least = total(paper_rows(stage_rows(shape, parallel, pipeline_rank, recompute, num_microbatches)))
    if least > budget_bytes:
        raise ConfigError(
            "budget_bytes",
            f"rank {pipeline_rank} needs {least:,} with recompute = {recompute.name!r}, got {budget_bytes:,}",
        )
    count = in_flight(parallel, pipeline_rank, num_microbatches)
    more = layer_bytes(shape, parallel) - layer_bytes(shape, parallel, recompute)
    if more == 0:
        return count
    return min(count, (budget_bytes - least) // (more * layers_per_chunk(shape, parallel)))


def bytes_by_rank(
    shape: ModelShape,
    parallel: Parallel,
    recompute: Recompute | str = "none",
    num_microbatches: int | None = None,
    element_size: int = 2,
    free_outputs: bool = True,
) -> list[int]:
    """Predict for each pipeline rank the activation bytes at its peak, as the paper counts them.

    Args:
        shape: the sizes of the whole model and of one microbatch.
        parallel: how the ranks share the model; t, ``sequence_parallel``, p and m are read.
        recompute: a mode of recomputation, or its name, such as "selective".
        num_microbatches: microbatches of one step; None: enough to fill the pipeline.
        element_size: bytes of an activation element.
        free_outputs: False adds the outputs that the runtime holds after sending them (``stage_output_rows``).

    Returns: one number of bytes for each rank, from the first stage to the last.
    Source: 2205.05198 figure 9.
    """
    totals = []
    for rank in range(parallel.pipeline_parallel_size):
        rows = paper_rows(stage_rows(shape, parallel, rank, recompute, num_microbatches, element_size))
        if not free_outputs:
            rows += stage_output_rows(shape, parallel, rank, num_microbatches, element_size)
        totals.append(total(rows))
    return totals
