"""The figures of chapters 3 and 4: what they draw is what the formulas say."""

import pytest
from hypothesis import given

from actmem.config import PAPER_MODELS, Parallel, model_shape
from actmem.formulas.activations import eq2, eq4, layer_rows
from actmem.formulas.communication import layer_collectives
from actmem.rows import total
from actmem_course.figures.ch03_tensor_parallelism import (
    COLUMNS_FIRST,
    ROWS_FIRST,
    divided_and_whole,
    floor_lines,
    saved_coefficient,
    sizes_of_t,
)
from actmem_course.figures.ch04_sequence_parallelism import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    RANKS,
    backward_timeline,
    qkv_backward_seconds,
    ring_step,
    saved_lines,
)
from actmem_course.figures.operators import CONJUGATE_OF, FORWARD_COLLECTIVE
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_course.others.ring import ring
from tests.shapes import shapes

GPT3 = model_shape("175B")


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_columns_first_saves_the_rows_of_the_formula(t):
    """X, the GeLU input and the second linear's input, as table 2 has them."""
    shape = model_shape("1T")
    _, b, h, s = shape.letters()
    rows = [row for row in layer_rows(shape, Parallel(t)) if row.term in ("h→4h input", "GeLU input", "4h→h input")]
    assert saved_coefficient(COLUMNS_FIRST, t) * s * b * h == total(rows)
    assert saved_coefficient(ROWS_FIRST, t) >= saved_coefficient(COLUMNS_FIRST, t)


@given(shapes())
def test_divided_and_whole_add_up_to_equation_2(shape):
    for t in sizes_of_t(shape):
        divided, whole = divided_and_whole(shape, t)
        assert total(divided) + total(whole) == eq2(shape, t)
        assert total(whole) == total(divided_and_whole(shape, 1)[1]), "what isn't sharded doesn't shrink"


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_lines_show_equation_2(name):
    shape = model_shape(name)
    drawing = floor_lines(shape, 8)
    together, divided, floor = drawing.traces
    unit = {"GiB": 2**30, "MiB": 2**20}[drawing.layout["yaxis"]["title"]["text"].split()[-1]]
    for t, sum_, part, rest in zip(together["x"], together["y"], divided["y"], floor["y"], strict=True):
        assert sum_ * unit == pytest.approx(eq2(shape, t)) and sum_ == pytest.approx(part + rest)


PAYLOAD = 2 * 2048 * 12288


def words_of(drawing):
    """Texts in boxes, in the order of the boxes."""
    return next(trace for trace in drawing.traces if "customdata" in trace and "text" in trace)


@pytest.mark.parametrize("t", RANKS)
def test_an_all_reduces_boxes_count_terms_and_its_arrows_go_to_the_next_rank(t):
    for step, state in enumerate(ring("all-reduce", t, PAYLOAD)):
        drawing = ring_step("all-reduce", t, step, PAYLOAD)
        wanted = {(rank, (rank + 1) % t, state.received[(rank + 1) % t]) for rank in range(t)} if step else set()
        assert {(int(y0), int(y1), int(x0 - 0.2 * t)) for (x0, _), (y0, y1) in arrows(drawing)} == wanted
        assert f"sent {size_text(state.sent_bytes)}" in drawing.alt
    first, half, last = (words_of(ring_step("all-reduce", t, n, PAYLOAD))["text"] for n in (0, t - 1, 2 * (t - 1)))
    assert first == [f"1/{t}"] * t * t and last == ["Σ"] * t * t
    assert [place for place, text in enumerate(half) if text == "Σ"] == [rank * t + rank for rank in range(t)]


def arrows(drawing):
    """Start and end of each, of x and of y.  All are in one trace, with a gap after each."""
    marked = [trace for trace in drawing.traces if trace.get("marker", {}).get("symbol") == "arrow"]
    return [
        (trace["x"][place : place + 2], trace["y"][place : place + 2])
        for trace in marked
        for place in range(0, len(trace["x"]), 3)
    ]


def test_the_lines_over_t_are_equations_2_and_4():
    drawing = saved_lines(GPT3, 8, True)
    for trace, equation in zip(drawing.traces, (eq2, eq4), strict=True):
        assert trace["y"] == pytest.approx([equation(GPT3, t) / 2**20 for t in sizes_of_t(GPT3)])
    before = saved_lines(GPT3, 2, False)
    assert before.layout["yaxis"]["range"] == drawing.layout["yaxis"]["range"] and len(before.traces) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_operators_collectives_are_those_of_half_a_layer(sequence_parallel):
    """A layer has two blocks, each with one pair of operators."""
    drawn = []
    for operator in ("g", "ḡ") if sequence_parallel else ("f", "f̄"):
        drawn += [(FORWARD_COLLECTIVE[operator], "forward"), (FORWARD_COLLECTIVE[CONJUGATE_OF[operator]], "backward")]
    layer = layer_collectives(GPT3, Parallel(8, sequence_parallel), keep_gathered_input=True)
    assert sorted(2 * [(each.kind, each.phase) for each in layer]) == sorted(2 * [pair for pair in drawn if pair[0]])
    assert all(each.count == 2 for each in layer)


def test_the_time_line_is_to_scale():
    matmul, half = qkv_backward_seconds(GPT3, 8)
    a, b, h, s = GPT3.letters()
    assert matmul * FLOPS_PER_SECOND == pytest.approx(6 * s * b * h * h / 8)
    assert half * BYTES_PER_SECOND == pytest.approx(7 / 8 * PAYLOAD)
    colours = {trace.get("fillcolor"): trace["x"] for trace in backward_timeline(GPT3, 8).traces}
    wide, narrow = (colours[FILLS[name].colour] for name in ("backward", "communication buffers"))
    assert (narrow[1] - narrow[0]) / (wide[1] - wide[0]) == pytest.approx(half / matmul)
