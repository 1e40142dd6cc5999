"""Predict what one pipeline rank sends to its neighbours in one iteration."""

from actmem.config import ModelShape, Parallel, check_size
from actmem.formulas.communication import PredictedCollective, activation_bytes
from actmem.formulas.stages import check_stage


def pipeline_sends(
    shape: ModelShape, parallel: Parallel, num_microbatches: int, pipeline_rank: int = 0, element_size: int = 2
) -> list[PredictedCollective]:
    """List what one rank sends to the neighbouring stages in one iteration: outputs forward, gradients backward.

    One send has 2sbh bytes in 16 bits, or 2sbh/t with sequence parallelism. With m model chunks a rank sends m times as
    often.

    Args:
        shape: the model's sizes.
        parallel: how ranks share the model.
        num_microbatches: microbatches of the iteration.
        pipeline_rank: which rank of the pipeline, from 0.
        element_size: bytes of an activation element.

    Returns: at most two rows: the sends of forward, and those of backward. The last stage sends nothing forward with
        its last model chunk, and the first stage nothing backward with its first.
    """
    check_stage(shape, parallel, pipeline_rank, element_size)
    n, m, p = num_microbatches, parallel.num_model_chunks, parallel.pipeline_parallel_size
    check_size("num_microbatches", n)
    size = activation_bytes(shape, element_size) // parallel.sequence_parts
    forward = n * (m - (pipeline_rank == p - 1))  # the last stage of the model sends nothing on
    backward = n * (m - (pipeline_rank == 0))
    rows = [
        PredictedCollective("send", "forward", 2, size, forward),
        PredictedCollective("send", "backward", 2, size, backward),
    ]
    return [row for row in rows if row.count]
