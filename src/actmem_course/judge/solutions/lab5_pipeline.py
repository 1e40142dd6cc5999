"""python my/labs/lab5_pipeline.py

Lab 5: the pipeline (2205.05198 section 4.2.3, appendices B and C).

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them: the orders that you write are simulated, with all the ranks that they
are for.  For a hint, add --hint 5.1.

Ranks, microbatches, and the model chunks of a rank are numbered from 0.  Every rank runs its own list in
order; an action waits until its input has arrived.  A backward takes as long as two forwards.
"""

import torch


# 5.1
def one_forward_one_backward(pipeline_parallel_size: int, rank: int, num_microbatches: int) -> list[tuple[str, int]]:
    """Return the forward and backward passes of one rank in a training step under 1F1B, in order.

    No rank may hold more microbatches than 1F1B needs, and no rank may be idle except while the pipeline fills and
    drains.

    Args:
        pipeline_parallel_size: p.
        rank: from 0 to p − 1.
        num_microbatches: n, which may be smaller than p.

    Returns:
        A list with ("F", i) for the forward of microbatch i and ("B", i) for its backward, each once.

    Source: 2205.05198 section 4.2.3.
    """
    ahead = min(pipeline_parallel_size - rank - 1, num_microbatches)
    order = [("F", i) for i in range(ahead)]
    for i in range(ahead, num_microbatches):
        order += [("F", i), ("B", i - ahead)]
    return order + [("B", i) for i in range(num_microbatches - ahead, num_microbatches)]


# 5.2
def interleaved(
    pipeline_parallel_size: int, rank: int, num_model_chunks: int, num_microbatches: int
) -> list[tuple[str, int, int]]:
    """Return the forward and backward passes of one rank under interleaved 1F1B, in order.

    Each rank has m ≥ 2 model chunks: chunk c of rank r is part c·p + r of the model's m·p parts.  The forward of p
    microbatches goes through chunk 0, then the forward of the same p through chunk 1, and so on through all chunks;
    then come the next p microbatches.  Backward goes through the chunks in reverse order.  Sends take no time here, so
    a shorter warm-up, which doesn't hide sends, is right as well.

    Args:
        pipeline_parallel_size: p.
        rank: from 0 to p − 1.
        num_model_chunks: m, at least 2.
        num_microbatches: n, divisible by p.

    Returns:
        A list with ("F", c, i) for the forward of microbatch i through chunk c and ("B", c, i) for its backward, each
        once.

    Source: 2205.05198 section 4.2.3.
    """
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    passes = [(chunk, first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p)]
    forwards = [("F", chunk, i) for chunk, i in passes]
    backwards = [("B", m - 1 - chunk, i) for chunk, i in passes]
    ahead = min(2 * (p - rank - 1) + (m - 1) * p, n * m)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return order + backwards[n * m - ahead :]


# 5.3
def free_output(output: torch.Tensor) -> None:
    """Free the memory of a stage's output after it was sent; output.backward(gradient) must still work afterwards.

    Args:
        output: of any shape; no operation has saved it for backward.  Leave its graph, shape and dtype unchanged.

    Source: 2205.05198 appendix B.
    """
    output.untyped_storage().resize_(0)


# 5.4
def how_many_fit(budget_bytes: int, in_flight: int, full_bytes: int, recomputed_bytes: int) -> int:
    """Return how many microbatches in flight can save all their activations, if the other microbatches are recomputed.

    A microbatch is in flight on a rank from its forward until its backward there.

    Args:
        budget_bytes: the most bytes that all microbatches in flight may take together.
        in_flight: how many microbatches are in flight.
        full_bytes: bytes of a microbatch that saves all its activations.
        recomputed_bytes: bytes of a microbatch that is recomputed.

    Returns:
        A number of microbatches, at most in_flight; -1 if they don't fit even when all are recomputed.

    Source: 2205.05198 appendix C.
    """
    left, more = budget_bytes - in_flight * recomputed_bytes, full_bytes - recomputed_bytes
    if left < 0:
        return -1
    return min(in_flight, left // more) if more else in_flight
