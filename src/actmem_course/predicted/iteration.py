"""Collectives and sends of one pipeline rank in an iteration: layers, embedding and loss, neighbours, gradients."""

from __future__ import annotations

from dataclasses import replace

from actmem.config import ModelShape, Parallel, check_size
from actmem.formulas.communication import PredictedCollective, activation_bytes, layer_collectives
from actmem.formulas.first_stage import check_stage, layers_per_chunk
from actmem.recipes import Recompute


def ends_collectives(
    shape: ModelShape, parallel: Parallel, pipeline_rank: int = 0, element_size: int = 2
) -> list[PredictedCollective]:
    """Collectives of one microbatch in the embedding (rank 0) and in the output layer and loss (rank p − 1)."""
    check_stage(shape, parallel, pipeline_rank)
    t, size = parallel.tensor_parallel_size, activation_bytes(shape, element_size)
    if t == 1:
        return []
    sequence = parallel.sequence_parallel
    reduction = "reduce-scatter" if sequence else "all-reduce"
    rows = []
    if pipeline_rank == 0:
        rows = [PredictedCollective(reduction, "forward", "embedding", t, size)]
        rows += [PredictedCollective("all-gather", "backward", "embedding", t, size)] * sequence
    if pipeline_rank == parallel.pipeline_parallel_size - 1:
        gather = PredictedCollective("all-gather", "forward", "output layer", t, size)
        again = PredictedCollective("all-gather", "backward", "input of the output layer, gathered again", t, size)
        numbers = max(element_size, 4) * shape.seq_length * shape.micro_batch_size
        rows += [gather, again] * sequence
        rows.append(PredictedCollective(reduction, "backward", "output layer", t, size))
        rows.append(PredictedCollective("all-reduce", "forward", "largest logit of each token", t, numbers))
        rows.append(PredictedCollective("all-reduce", "forward", "sum and target logit of each token", t, 2 * numbers))
    return rows


def step_collectives(
    shape: ModelShape, parallel: Parallel, pipeline_rank: int = 0, element_size: int = 2
) -> list[PredictedCollective]:
    """Collectives of gradients on one rank, once an iteration, in the parameters' dtype.

    Under sequence parallelism each rank has the gradients of layer norms, of the biases after ḡ
    and of positions from its own tokens only: one all-reduce for each chunk.  With p > 1 the
    two copies of the word embedding are added up between the first and the last stage.
    """
    check_stage(shape, parallel, pipeline_rank)
    _, _, h, s = shape.letters()
    e, t, p = element_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    per_chunk, rows = layers_per_chunk(shape, parallel), []
    if t > 1 and parallel.sequence_parallel:
        for chunk in range(parallel.num_model_chunks):
            elements = 6 * h * per_chunk
            if pipeline_rank == 0 and chunk == 0:
                elements += s * h
            if pipeline_rank == p - 1 and chunk == parallel.num_model_chunks - 1:
                elements += 2 * h
            rows.append(
                PredictedCollective("all-reduce", "step", f"gradients seen in parts, chunk {chunk}", t, e * elements)
            )
    if p > 1 and pipeline_rank in (0, p - 1):
        rows.append(
            PredictedCollective(
                "all-reduce", "step", "word embedding, first and last stage", 2, e * shape.vocab_size * h // t
            )
        )
    return rows


def pipeline_sends(
    shape: ModelShape, parallel: Parallel, num_microbatches: int, pipeline_rank: int = 0, element_size: int = 2
) -> list[PredictedCollective]:
    """What one rank sends to the neighbouring stages in an iteration: outputs forward, gradients back.

    2sbh bytes each in 16 bits, 2sbh/t under sequence parallelism.  With m chunks a rank sends m
    times as often.
    """
    check_stage(shape, parallel, pipeline_rank)
    n, m, p = num_microbatches, parallel.num_model_chunks, parallel.pipeline_parallel_size
    check_size("num_microbatches", n)
    size = activation_bytes(shape, element_size) // parallel.sequence_parts
    forward = n * (m - (pipeline_rank == p - 1))  # the last stage of the model sends nothing on
    backward = n * (m - (pipeline_rank == 0))
    rows = [
        PredictedCollective("send", "forward", "outputs, to the next stage", 2, size, forward),
        PredictedCollective("send", "backward", "gradients, to the stage before", 2, size, backward),
    ]
    return [row for row in rows if row.count]


def iteration_collectives(
    shape: ModelShape,
    parallel: Parallel,
    num_microbatches: int,
    pipeline_rank: int = 0,
    recompute: Recompute | str = "none",
    element_size: int = 2,
) -> list[PredictedCollective]:
    """Everything that one rank sends in one iteration of n microbatches, without data parallelism."""
    n = check_size("num_microbatches", num_microbatches)
    layers = layers_per_chunk(shape, parallel) * parallel.num_model_chunks
    in_layers = layer_collectives(shape, parallel, recompute, element_size)
    at_ends = ends_collectives(shape, parallel, pipeline_rank, element_size)
    return [
        *(replace(collective, count=collective.count * layers * n) for collective in in_layers),
        *(replace(collective, count=collective.count * n) for collective in at_ends),
        *pipeline_sends(shape, parallel, n, pipeline_rank, element_size),
        *step_collectives(shape, parallel, pipeline_rank, element_size),
    ]
