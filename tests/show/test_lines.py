"""The roofline and the frontier: each point is the formula's."""

import pytest

from actmem.config import Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND, forward_operations, layer_overhead
from actmem.models import PAPER_MODELS, TINY, model_shape
from actmem.plan.actions import PricedLayer, frontier, recompute_choices
from actmem.rows import total
from actmem_course.show.times import roofline
from actmem_course.show.today import frontier_figure

SHAPE, CUT = model_shape("22B"), Parallel(8, True)
A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
LARGE = SHAPE.with_sizes(seq_length=16384, micro_batch_size=8)


@pytest.mark.parametrize("shape, cut", [(SHAPE, CUT), (LARGE, Parallel()), (TINY, Parallel(2, True))])
def test_every_operation_is_on_the_roof(shape, cut):
    roof, *points = roofline(shape, cut).traces
    drawn = {about[0]: (x, y) for t in points for x, y, about in zip(t["x"], t["y"], t["customdata"])}
    operations = forward_operations(shape, cut)
    assert list(drawn) != [] and set(drawn) == {o.name for o in operations}
    for o in operations:
        x, y = drawn[o.name]
        assert x == float(o.intensity)
        assert y == pytest.approx(min(A100[0], x * A100[1]) / 1e12)
        low, high = roofline(shape, cut).layout["xaxis"]["range"]
        assert 10**low < x < 10**high, "off the axis"
    assert roof["x"][1] == A100[0] / A100[1]


@pytest.mark.parametrize("model", PAPER_MODELS)
def test_the_frontier_and_the_named_modes(model):
    shape = PAPER_MODELS[model].shape
    a, b, h, s = shape.letters()
    every, line, offload, compress, named = frontier_figure(shape).traces
    layer = PricedLayer.of(shape)
    assert len(every["x"]) == 32
    assert len(line["x"]) == len(frontier(recompute_choices(layer), lambda choice: choice.flops))
    for x, y, mode in zip(named["x"], named["y"], named["text"]):
        assert x == float(100 * layer_overhead(shape, mode))
        assert y * s * b * h == pytest.approx(total(layer_rows(shape, recompute=mode)), rel=1e-12)
    # Elementwise and full lie on the line: nothing keeps less for as few FLOPs.
    on_line = {(round(x, 9), round(y, 9)) for x, y in zip(line["x"], line["y"])}
    assert {(round(named["x"][i], 9), round(named["y"][i], 9)) for i in (2, 3)} <= on_line
    for before, after in ((line, offload), (offload, compress)):  # more ways keep no more in no more time
        for x, y in zip(before["x"], before["y"]):
            assert any(other <= x + 1e-9 and kept <= y for other, kept in zip(after["x"], after["y"]))
    for trace in (line, offload, compress):
        assert trace["y"] == sorted(trace["y"], reverse=True) and trace["x"] == sorted(trace["x"])
