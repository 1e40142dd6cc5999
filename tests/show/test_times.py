"""Chapter 7's figures: valid plotly, and their numbers are the formulas' and table 5's."""

import pytest

from actmem.config import Parallel
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND, forward_operations, least_seconds
from actmem.models import PAPER_MODELS, TINY, model_shape
from actmem_course.others import paper
from actmem_course.others.table5 import table5
from actmem_course.show.times import least_times, roofline, training_days, utilisation_bars

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


def test_bars_add_up_to_the_forward_pass():
    milliseconds = sum(sum(trace["x"]) for trace in least_times(SHAPE, CUT).traces)
    assert milliseconds == pytest.approx(1000 * float(least_seconds(forward_operations(SHAPE, CUT), *A100)))


def test_utilisation_is_table_5():
    full, both = utilisation_bars().traces
    assert full["y"] == [row.full_recompute_mfu_percent for row in table5()]
    assert both["y"] == [row.mfu_percent for row in table5()]
    assert [abs(y - paper.TABLE5[name].mfu_percent) < 0.2 for name, y in zip(both["x"], both["y"])] == [True] * 4


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_days_are_iterations_times_seconds(name):
    model = PAPER_MODELS[name]
    tokens_a_day = model.global_batch_size * model.shape.seq_length * 86_400 / paper.TABLE5[name].seconds
    full, both = training_days(name, 100)
    assert both == pytest.approx(100e9 / tokens_a_day)
    assert full / both == pytest.approx(paper.TABLE5[name].full_recompute_seconds / paper.TABLE5[name].seconds)
