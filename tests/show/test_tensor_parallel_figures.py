"""The figures of chapter 3: what they draw is what the formulas say."""

import pytest
from hypothesis import given

from actmem.config import ConfigError, Parallel
from actmem.formulas.activations import eq2, layer_rows
from actmem.models import PAPER_MODELS, model_shape
from actmem.rows import total
from actmem_course.show.tensor_parallel import (
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
    assert f"from t = {(24 + 5 * a * s / h) / 10:.1f}" in floor_lines(GPT3, 8).layout["title"]["text"]
