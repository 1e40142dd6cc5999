"""Chapter 7's figures: the roofline, and the forward pass on it, are the formulas'."""

import pytest

from actmem.config import TINY, Parallel, model_shape
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND, forward_operations
from actmem_course.figures.ch07_time import roofline

SMALL, SHARDED = model_shape("22B"), Parallel(8, True)
LARGE = SMALL.with_sizes(seq_length=16384, micro_batch_size=8)
SHORT = SMALL.with_sizes(seq_length=256, micro_batch_size=1)
A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
SIZES = [(SMALL, SHARDED), (LARGE, Parallel()), (TINY, Parallel(2, True)), (SHORT, Parallel(16, True))]


@pytest.mark.parametrize("shape, parallel", SIZES)
def test_every_operation_is_on_the_roof_and_named(shape, parallel):
    drawing = roofline(shape, parallel)
    roof, *points, names = drawing.traces
    drawn = {about[0]: (x, y) for t in points for x, y, about in zip(t["x"], t["y"], t["customdata"])}
    operations = forward_operations(shape, parallel)
    assert set(drawn) == {o.name for o in operations} == {name for text in names["text"] for name in text.split("<br>")}
    low, high = drawing.layout["xaxis"]["range"]
    for o in operations:
        x, y = drawn[o.name]
        assert x == float(o.intensity)
        assert y == pytest.approx(min(A100[0], x * A100[1]) / 1e12)
        assert 10**low < x < 10**high, "off the axis"
    assert roof["x"][1] == A100[0] / A100[1]
    assert set(zip(names["x"], names["y"])) <= set(drawn.values()), "names stand at markers"
