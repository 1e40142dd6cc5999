"""The figures of chapters 3 and 4: what they draw is what the formulas say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import PAPER_MODELS, ConfigError, Parallel, model_shape
from actmem.formulas.activations import eq2, eq4, layer_rows
from actmem.formulas.communication import Exchange
from actmem.rows import LAYER_TERMS, total
from actmem_course.figures.ch03_tensor_parallelism import (
    BY_HEAD,
    BY_KIND,
    COLUMNS_FIRST,
    ROW_ORDERS,
    ROWS_FIRST,
    blocks,
    complete_heads,
    divided_and_whole,
    floor_bars,
    floor_lines,
    kept_coefficient,
    mlp_cut,
    qkv_cut,
    shares,
    sizes_of_t,
)
from actmem_course.figures.ch04_sequence_parallelism import (
    CONJUGATE_OF,
    EXCHANGES_AFTER,
    FORWARD_EXCHANGE,
    GATHERED_FORMS,
    MODES,
    RANKS,
    SEQUENCE,
    TENSOR,
    coefficients,
    gathered_lines,
    operator_ring,
    operator_states,
    parts,
    rank_parts,
)
from actmem_course.figures.diagrams import EMPTY, Box, boxes
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_course.others.ring import ring
from tests.shapes import shapes

GPT3 = model_shape("175B")


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_columns_first_keeps_the_rows_of_the_formula(t):
    """X, the GeLU input and the second linear's input, as table 2 has them."""
    shape = model_shape("1T")
    _, b, h, s = shape.letters()
    rows = [row for row in layer_rows(shape, Parallel(t)) if row.term in ("h→4h input", "GeLU input", "4h→h input")]
    assert kept_coefficient(COLUMNS_FIRST, t) * s * b * h == total(rows)
    assert kept_coefficient(ROWS_FIRST, t) >= kept_coefficient(COLUMNS_FIRST, t)


def test_the_mlps_parts_are_the_ranks():
    words = [trace for trace in mlp_cut(4).traces if "customdata" in trace][0]
    assert words["text"].count("0") == words["text"].count("3") == 3 and words["text"].count("all") == 1
    with pytest.raises(ConfigError, match="colours for 1 to 8 ranks"):
        mlp_cut(9)


@pytest.mark.parametrize("order", ROW_ORDERS)
@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_every_block_of_qkv_is_on_one_rank(order, t):
    parts = shares(order, 8, t)
    assert sum(parts, []) == blocks(order, 8) and len(set(blocks(order, 8))) == 24
    assert {len(part) for part in parts} == {24 // t}


@pytest.mark.parametrize("t", [2, 4, 8])
def test_heads_are_complete_only_head_by_head(t):
    assert [len(complete_heads(part)) for part in shares(BY_HEAD, 8, t)] == [8 // t] * t
    assert [len(complete_heads(part)) for part in shares(BY_KIND, 8, t)] == [0] * t
    with pytest.raises(ConfigError, match="num_attention_heads"):
        qkv_cut(3)


@given(shapes())
def test_divided_and_whole_add_up_to_equation_2(shape):
    for t in sizes_of_t(shape):
        divided, whole = divided_and_whole(shape, t)
        assert total(divided) + total(whole) == eq2(shape, t)
        _, b, h, s = shape.letters()
        assert len(whole) == (6 if shape.num_attention_heads > 1 else 15)
        assert shape.num_attention_heads == 1 or total(whole) == 10 * s * b * h


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_lines_and_bars_show_equation_2(name):
    shape = model_shape(name)
    together, divided, floor = floor_lines(shape, 8).traces[:3]
    for t, sum_, part, rest in zip(together["x"], together["y"], divided["y"], floor["y"], strict=True):
        assert sum_ * 2**30 == pytest.approx(eq2(shape, t)) and sum_ == pytest.approx(part + rest)
    segments = [trace for trace in floor_bars(shape, 8).traces if trace["x"] != [None]]
    unit = {"GiB": 2**30, "MiB": 2**20}[floor_bars(shape, 8).layout["xaxis"]["title"]["text"].split()[-1]]
    assert sum(trace["x"][0] for trace in segments) * unit == pytest.approx(eq2(shape, 8))


def test_the_title_names_where_floor_and_the_rest_are_equal():
    """10 = (24 + 5as/h)/t."""
    a, _, h, s = GPT3.letters()
    assert f"from {math.ceil((24 + 5 * a * s / h) / 10)} ranks on" in floor_lines(GPT3, 8).layout["title"]["text"]


PAYLOAD = 2 * 2048 * 12288


def words_of(drawing):
    """Texts in boxes, in the order of the boxes."""
    return next(trace for trace in drawing.traces if "customdata" in trace)


@pytest.mark.parametrize("t", RANKS)
def test_an_all_reduces_boxes_count_terms_and_its_arrows_go_to_the_next_rank(t):
    for step, state in enumerate(ring("all-reduce", t, PAYLOAD)):
        drawing = operator_ring("f̄", t, step, PAYLOAD)
        wanted = {(rank, (rank + 1) % t, state.received[(rank + 1) % t]) for rank in range(t)} if step else set()
        assert {(int(y0), int(y1), int(x0 - 0.2 * t)) for (x0, _), (y0, y1) in arrows(drawing)} == wanted
        assert f"sent {size_text(state.sent_bytes)}" in drawing.alt
    first, half, last = (words_of(operator_ring("f̄", t, step, PAYLOAD))["text"] for step in (0, t - 1, 2 * (t - 1)))
    assert first == [f"1/{t}"] * t * t and last == ["Σ"] * t * t
    assert [place for place, text in enumerate(half) if text == "Σ"] == [rank * t + rank for rank in range(t)]


def arrows(drawing):
    marked = [trace for trace in drawing.traces if trace.get("marker", {}).get("symbol") == "arrow"]
    return [(trace["x"], trace["y"]) for trace in marked]


@pytest.mark.parametrize("t", [2, 4, 8])
def test_parts_are_equations_2_and_4(t):
    alone, both = parts(GPT3, t, TENSOR), parts(GPT3, t, SEQUENCE)
    assert total(row for row, _ in alone) == eq2(GPT3, t) and total(row for row, _ in both) == eq4(GPT3, t)
    assert tuple(row.term for row, _ in alone) == LAYER_TERMS
    whole = [row.term for row, axis in alone if not axis]
    assert len(whole) == 6 and [row.term for row, axis in both if axis == "s"] == whole
    assert all(row.split_by == t for row, _ in both)
    assert [axis for _, axis in alone if axis] == [axis for _, axis in both if axis != "s"]


@pytest.mark.parametrize(("mode", "per_tensor"), [(TENSOR, 6 * 4 + 9 * 4 * 2), (SEQUENCE, 15 * 4 * 2)])
def test_a_frame_and_a_part_for_each_tensor_and_rank(mode, per_tensor):
    hovers = words_of(rank_parts(GPT3, 4, mode))["customdata"]
    assert len(hovers) == per_tensor and all(any(term in hover for hover in hovers) for term in LAYER_TERMS)


def test_the_filled_area_is_what_is_held():
    """Filled area of a rank's frames over the frames' whole area, tensor by tensor: 1 or 1/t."""
    for mode in MODES:
        drawing = rank_parts(GPT3, 4, mode)
        filled = [trace for trace in drawing.traces if trace.get("fill") == "toself"]
        filled = [trace for trace in filled if trace["fillcolor"] != EMPTY.colour]
        area = 0.0
        for trace in filled:
            for i in range(0, len(trace["x"]), 6):
                area += (trace["x"][i + 1] - trace["x"][i]) * (trace["y"][i + 2] - trace["y"][i])
        frame = 0.92 * 4.85 / 4 * 0.78
        assert area / (4 * frame) == pytest.approx(sum(1 / row.split_by for row, _ in parts(GPT3, 4, mode)))


def test_frames_are_drawn_behind_parts():
    traces = boxes([Box(0, 0, 1, 1, FILLS["softmax"]), Box(1, 0, 1, 1, EMPTY)])
    assert [trace.get("fillcolor") for trace in traces] == [EMPTY.colour, FILLS["softmax"].colour, None]


def test_the_exchanges_stand_where_the_blocks_begin_and_end():
    assert list(EXCHANGES_AFTER) == ["QKV projection input", "attention projection input", "h→4h input", "4h→h input"]
    for mode, kinds in ((TENSOR, {"all-reduce": 4}), (SEQUENCE, {"all-gather": 4, "reduce-scatter": 4})):
        texts = " ".join(words[mode == SEQUENCE] for words in EXCHANGES_AFTER.values())
        assert {kind: texts.count(kind) for kind in kinds} == kinds


@given(st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_the_three_curves(t):
    assert list(coefficients(GPT3, t).values()) == pytest.approx([10 + 24 / t, 4 + 30 / t, 34 / t])
    for form, trace in zip(GATHERED_FORMS, gathered_lines(GPT3, t).traces, strict=True):
        assert trace["name"] == form and trace["y"][trace["x"].index(t)] == coefficients(GPT3, t)[form]


@pytest.mark.parametrize("t", RANKS)
@pytest.mark.parametrize("operator", FORWARD_EXCHANGE)
def test_an_operator_sends_what_the_closed_form_says_and_its_conjugates_exchange_in_backward(operator, t):
    states = operator_states(operator, t, PAYLOAD)
    kinds = {pass_: kind for pass_, kind, _ in states}
    assert kinds == {"forward": FORWARD_EXCHANGE[operator], "backward": FORWARD_EXCHANGE[CONJUGATE_OF[operator]]}
    wire = [Exchange(kind, "forward", "", t, PAYLOAD).wire_bytes for kind in kinds.values() if kind]
    assert states[-1][2].sent_bytes == sum(wire)
    drawings = [operator_ring(operator, t, moment, PAYLOAD) for moment in range(len(states))]
    for drawing, (pass_, _, state) in zip(drawings, states, strict=True):
        assert len(arrows(drawing)) == (t if state.step else 0)
        assert f"{operator}, {pass_}" in drawing.alt and size_text(state.sent_bytes) in drawing.alt


@pytest.mark.parametrize("t", RANKS)
def test_gathering_begins_with_one_chunk_a_rank_and_ends_with_all(t):
    forward = [moment for moment, (pass_, _, _) in enumerate(operator_states("g", t, PAYLOAD)) if pass_ == "forward"]
    first, last = (words_of(operator_ring("g", t, moment, PAYLOAD))["text"] for moment in (forward[0], forward[-1]))
    assert sorted(first) == sorted([*map(str, range(t)), *["\u00a0"] * (t * t - t)])
    assert sorted(last) == sorted([str(chunk) for chunk in range(t)] * t)
