"""Chapter 5's figures: valid plotly, and their numbers are the formulas'."""

from fractions import Fraction

import pytest

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, TABLE2, closed_form, eq1, layer_rows
from actmem.formulas.flops import layer_overhead, layer_products
from actmem.models import PAPER_MODELS, TINY, model_shape
from actmem.rows import LAYER_TERMS, total
from actmem_course.others.larger_batches import fullest_bytes, throughput
from actmem_course.show.recomputation import (
    LADDER,
    SHARES,
    added_flops,
    batch_payoff,
    core_over_gelu,
    memory_ladder,
    rebuild_price,
    rebuilds,
    recompute_trade,
    step_timeline,
    training_moments,
)

GPT3 = model_shape("175B")
LONG = ModelShape(16384, 1, 1024, 8, num_layers=8)


@pytest.mark.parametrize("shape", [GPT3, LONG, TINY])
def test_the_trades_bars_are_the_two_formulas(shape):
    kept, core, work, again = recompute_trade(shape).traces
    a, b, h, s = shape.letters()
    share = Fraction(5 * a * s * s * b, eq1(shape))
    assert core["x"] == [pytest.approx(float(100 * share))]
    assert kept["x"] == pytest.approx([float(100 * (1 - share))] * 2 + [100 * 2 * s * b * h / eq1(shape)])
    assert work["x"] == [100.0] * 3
    assert again["x"] == pytest.approx([float(100 * layer_overhead(shape, mode)) for mode in ("selective", "full")])


def test_prices_fall_and_the_cores_is_5_over_2d():
    prices = [trace["x"][0] for trace in rebuild_price(GPT3).traces]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] == pytest.approx(1000 * 5 / (2 * GPT3.head_size))


@pytest.mark.parametrize("shape", [GPT3, LONG, TINY])
def test_groups_are_the_whole_layer_but_its_input(shape):
    groups = rebuilds(shape)
    _, b, h, s = shape.letters()
    assert sum(r.bytes for r in groups) == eq1(shape) - 2 * s * b * h
    assert sum(r.flops for r in groups) == sum(layer_products(shape).values()) - layer_products(shape)["4h→h"]
    assert sorted(term for r in groups for term in r.terms) == sorted(LAYER_TERMS[1:])
    by_name = {r.name: r for r in groups}
    core, gelu = by_name["attention core"], by_name["GeLU input"]
    assert core.bytes_per_flop / gelu.bytes_per_flop == core_over_gelu(shape)


def test_added_flops_are_the_five_counts():
    _, _, h, s = GPT3.letters()
    modes = [layer_overhead(GPT3, mode) for mode in ("paper-selective", "selective", "paper-full", "full")]
    expected = [100 * s / (6 * h), *(float(100 * share) for share in modes)]
    assert [trace["x"][0] for trace in added_flops(GPT3).traces] == pytest.approx(expected)


@pytest.mark.parametrize("s, t", [(2048, 8), (512, 4)])
def test_the_ladder_is_table_2(s, t):
    rows = {row.name: row for row in TABLE2}
    for trace in memory_ladder(s, t).traces:
        for name, share in zip(trace["x"], trace["y"], strict=True):
            shape = PAPER_MODELS[name].shape.with_sizes(seq_length=s)
            assert share == 100 * closed_form(rows[trace["name"]], shape, t) / closed_form(rows["tensor"], shape, t)
    assert list(LADDER) == [row.name for row in TABLE2 if row.tensor_parallel]


def test_the_ladder_refuses_ranks_that_cannot_share_the_models():
    with pytest.raises(ConfigError):
        memory_ladder(2048, 3)


def test_the_payoffs_lines_and_markers_are_the_step_model():
    selective, marker, full, full_marker, _ = batch_payoff(GPT3, 34).traces
    for line, point, mode in ((selective, marker, "selective"), (full, full_marker, "paper-full")):
        assert line["y"] == [float(throughput(GPT3, mode, Fraction(share, 100))) for share in SHARES]
        assert point["y"] == [line["y"][SHARES.index(34)]]


# One training step as blocks: what is pushed is popped, and its fullest moment is the formula's.


STEP = model_shape("175B").with_sizes(num_layers=4)
MODES = ("none", "selective", "full")


@pytest.mark.parametrize("recompute", ("none", "full"))
@pytest.mark.parametrize("shape", [STEP, TINY], ids=["GPT-3", "tiny"])
def test_it_is_fullest_where_the_formula_says(shape, recompute):
    sizes = [moment.bytes for moment in training_moments(shape, recompute)]
    assert max(sizes) == fullest_bytes(shape, recompute)
    assert sizes[0] == sizes[-1] == 0


@pytest.mark.parametrize("shape", [STEP, TINY], ids=["GPT-3", "tiny"])
def test_the_core_comes_back_when_what_came_after_it_is_freed(shape):
    """So the peak is below ``fullest_bytes``, which adds the core to layers that are still whole."""
    sizes = [moment.bytes for moment in training_moments(shape, "selective")]
    left, rows = total(layer_rows(shape, recompute="selective")), layer_rows(shape)
    last = max(place for place, row in enumerate(rows) if row.term in CORE_ATTENTION_TERMS)
    assert max(sizes) == max(shape.num_layers * left, (shape.num_layers - 1) * left + total(rows[: last + 1]))
    assert max(sizes) < fullest_bytes(shape, "selective")


@pytest.mark.parametrize("recompute", MODES)
def test_after_forward_each_layer_holds_its_rows(recompute):
    moments = training_moments(STEP, recompute)
    after_forward = [moment for moment in moments if moment.says.startswith("forward")][-1]
    assert all(rows == tuple(layer_rows(STEP, recompute=recompute)) for rows in after_forward.held)
    assert after_forward.bytes == STEP.num_layers * total(layer_rows(STEP, recompute=recompute))


def test_the_core_is_never_pushed_and_comes_back_one_layer_at_a_time():
    core = set(CORE_ATTENTION_TERMS)
    moments = training_moments(STEP, "selective")
    with_core = [[core <= {row.term for row in rows} for rows in moment.held] for moment in moments]
    assert max(map(sum, with_core)) == 1 and sum(moment.again for moment in moments) == STEP.num_layers
    assert not any(any(one) for one, moment in zip(with_core, moments) if moment.says.startswith("forward"))


@pytest.mark.parametrize("recompute", MODES)
def test_its_blocks_are_the_rows_held(recompute):
    moments = training_moments(STEP, recompute)
    for number in range(0, len(moments), 7):
        drawing = step_timeline(STEP, number, recompute)
        blocks = [trace for trace in drawing.traces if trace["type"] == "bar" and trace["x"] != [None]]
        held = sum(sum(trace["y"]) for trace in blocks)
        assert held * 2**30 == pytest.approx(moments[number].bytes)
        assert f"{moments[number].bytes:,} bytes held" in drawing.alt
