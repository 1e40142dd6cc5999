"""What a real layer keeps although the paper leaves it out: rows of their own, each with a reason."""

from __future__ import annotations

from actmem.config import ModelShape, Parallel, check_recompute
from actmem.rows import Row

#: Bytes of one saved random-number state.  CPU: the Mersenne Twister's, as torch stores it.
#: CUDA: Philox keeps an 8-byte seed and an 8-byte offset.
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}

STATISTICS_REASON = "mean and 1/deviation of each token; the paper ignores 2sb beside sbh (§4)"
MASK_REASON = "s×s, one for all heads and samples: the second run needs it again, backward itself does not"
RNG_REASON = "the random-number state that lets the second run draw the same dropout"


def layer_extra_rows(
    shape: ModelShape,
    parallel: Parallel = Parallel(),
    recompute: str = "none",
    element_size: int = 2,
    device_type: str = "cpu",
) -> list[Row]:
    """The rows beside ``layer_rows`` that torch really keeps for one layer on one rank.

    Layer-norm statistics (CPU: in the activations' dtype, CUDA: float32); for a core attention
    that runs again the causal mask (1 byte an element) and the state of its random numbers; for
    a whole layer that runs again the states of both streams.
    """
    check_recompute(recompute)
    _, b, _, s = shape.letters()
    cut = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    rng = RNG_STATE_BYTES[device_type]
    if recompute in ("full", "paper-full"):
        return [Row("random-number state", 2 * rng, 1, "checkpoint of the layer", RNG_REASON)]
    statistic = max(element_size, 4) if device_type == "cuda" else element_size
    rows = [
        Row("layer-norm 1 statistics", 2 * s * b * statistic // cut, cut, "layer norm", STATISTICS_REASON),
        Row("layer-norm 2 statistics", 2 * s * b * statistic // cut, cut, "layer norm", STATISTICS_REASON),
    ]
    if recompute in ("selective", "paper-selective"):
        where = "checkpoint of the core attention"
        rows.append(Row("causal mask", s * s, 1, where, MASK_REASON))
        rows.append(Row("random-number state", rng, 1, where, RNG_REASON))
    return rows
