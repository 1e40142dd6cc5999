"""What a real layer keeps and the paper leaves out: rows of their own, each with a reason."""

from __future__ import annotations

from actmem.checks import checked
from actmem.config import ModelShape, Parallel, check_layer
from actmem.recipes import PAPER_LAYER, Recompute
from actmem.rows import Row

#: Bytes of one saved random-number state.  CPU: the Mersenne Twister's, as torch stores it.
#: CUDA: Philox keeps an 8-byte seed and an 8-byte offset.
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}

STATISTICS_REASON = "mean and 1/deviation of each token; the paper ignores 2sb beside sbh (§4)"
MASK_REASON = "s×s, one for all heads and samples: the second run needs it again, backward itself does not"
RNG_REASON = "the random-number state that lets the second run draw the same dropout"


@checked
def layer_extra_rows(
    shape: ModelShape,
    parallel: Parallel = Parallel(),
    recompute: Recompute | str = "none",
    element_size: int = 2,
    device_type: str = "cpu",
) -> list[Row]:
    """What torch keeps for one layer on one rank beyond ``layer_rows``.

    Layer-norm statistics (CPU: in the activations' dtype, CUDA: float32); where the softmax runs
    again, the causal mask (1 byte an element); for a recomputed core attention a random-number
    state, for a recomputed layer those of both streams.  A mask dropped by name knows its seed.
    """
    check_layer(shape, parallel)
    region = Recompute.of(recompute).region
    _, b, _, s = shape.letters()
    cut = parallel.sequence_parts
    rng = RNG_STATE_BYTES[device_type]
    if region == "layer":
        return [Row("random-number state", 2 * rng, 1, "checkpoint of the layer", RNG_REASON)]
    statistic = max(element_size, 4) if device_type == "cuda" else element_size
    rows = [
        Row("layer-norm 1 statistics", 2 * s * b * statistic // cut, cut, "layer norm", STATISTICS_REASON),
        Row("layer-norm 2 statistics", 2 * s * b * statistic // cut, cut, "layer norm", STATISTICS_REASON),
    ]
    if "softmax output" in PAPER_LAYER.dropped(recompute):
        rows.append(Row("causal mask", s * s, 1, "softmax run again", MASK_REASON))
    if region == "core":
        rows.append(Row("random-number state", rng, 1, "checkpoint of the core attention", RNG_REASON))
    return rows
