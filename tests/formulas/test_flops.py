"""Products against equations 7 and 8 and torch's own count; bytes are what eager operations read and write."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import PAPER_MODELS, TINY, Parallel
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.formulas.flops import (
    Operation,
    eq7,
    eq8,
    forward_matmuls,
    forward_operations,
    hardware_flops,
    layer_matmuls,
    layer_overhead,
    least_seconds,
    text_selective,
)
from actmem.recipes import RECOMPUTE_MODES
from actmem_course.others import paper
from tests.shapes import model_cuts, shapes

BATCHES = st.integers(1, 2000)


@given(model_cuts(), BATCHES)
def test_matmuls_add_up_to_the_equations(cut, B):
    shape = cut[0]
    assert hardware_flops(shape, B) == eq7(shape, B)
    assert hardware_flops(shape, B, "paper-selective") == text_selective(shape, B)
    layers = [flops for name, flops in forward_matmuls(shape, B).items() if name != "logits"]
    assert hardware_flops(shape, B, "paper-full") == eq7(shape, B) + sum(layers)


@given(model_cuts(), BATCHES)
def test_equations_as_printed(cut, B):
    shape = cut[0]
    _, _, h, s = shape.letters()
    L, v = shape.num_layers, shape.vocab_size
    logits = Fraction(v, 12 * h * L)
    assert eq7(shape, B) == 72 * B * L * s * h * h * (1 + Fraction(s, 6 * h) + logits)
    assert eq8(shape, B) == 72 * B * L * s * h * h * (1 + Fraction(s, 3 * h) + logits)


@given(model_cuts(), BATCHES, st.sampled_from(RECOMPUTE_MODES))
def test_layer_overhead_is_the_share_of_the_layers_matmuls(cut, B, recompute):
    shape = cut[0]
    layers = 3 * sum(flops for name, flops in forward_matmuls(shape, B).items() if name != "logits")
    added = hardware_flops(shape, B, recompute) - eq7(shape, B)
    assert layer_overhead(shape, recompute) == Fraction(added, layers)


def test_ratios_of_gpt3():
    shape = PAPER_MODELS["175B"].shape
    ratios = {mode: round(float(1 + layer_overhead(shape, mode)), 5) for mode in RECOMPUTE_MODES}
    assert ratios == {
        "none": 1, "selective": 1.00450, "elementwise": 1.00450, "full": 1.22523, "paper-selective": 1.00901, "paper-full": 1.33333
    }  # fmt: skip
    s, h = shape.seq_length, shape.hidden_size
    assert layer_overhead(shape, "full") == Fraction(16 * h + 4 * s, 72 * h + 12 * s)
    layer_eq8 = Fraction(72 * h + 24 * s, 72 * h + 12 * s)
    assert round(float(layer_eq8), 4) == 1.0270
    # Three forward passes of the core attention where the text names one.
    assert layer_eq8 - 1 == 3 * layer_overhead(shape, "paper-selective")


def test_table_5_within_two_tenths_of_a_point():
    for name, printed in paper.TABLE5.items():
        mfu, before = (paper.mfu_percent(name, time) for time in (printed.seconds, printed.full_recompute_seconds))
        assert abs(mfu - printed.mfu_percent) < 0.2
        assert abs(100 * (mfu / before - 1) - printed.gain_percent) < 0.1  # the times are rounded
    # 8 global batches on 8 times the devices.
    run = paper.DATA_PARALLEL_530B
    assert abs(paper.mfu_percent("530B", run.seconds) - run.mfu_percent) < 0.2


@given(shapes())
def test_matmuls_are_those_of_appendix_a(shape):
    expected = layer_matmuls(shape)
    assert {o.name: o.flops for o in forward_operations(shape) if o.matmul} == expected


@given(st.sampled_from([2, 3, 4]), st.data())
def test_t_ranks_share_the_matmuls_flops_equally(t, data):
    shape = data.draw(shapes(divisible_by=t))
    one, shared = forward_operations(shape), forward_operations(shape, Parallel(t, True))
    assert [o.flops for o in one if o.matmul] == [t * o.flops for o in shared if o.matmul]
    # The core is cut whole: every head is on one rank, with all that it moves.
    assert [o.bytes for o in one if o.core] == [t * o.bytes for o in shared if o.core]


@given(shapes())
def test_what_is_kept_was_written(shape):
    """Of the core: scores' softmax and dropout output are written with two bytes each, the mask with one."""
    kept = sum(row.bytes for row in layer_rows(shape) if row.term in CORE_ATTENTION_TERMS)
    by_name = {o.name: o for o in forward_operations(shape)}
    a, b, _, s = shape.letters()
    scores = a * s * s * b
    read = 2 * scores * 2  # softmax and dropout each read one tensor of scores
    assert by_name["softmax"].bytes + by_name["softmax dropout"].bytes - read == kept


@pytest.mark.parametrize("t", [1, 4])
def test_what_linears_move_by_hand(t):
    by_name = {o.name: o for o in forward_operations(TINY, Parallel(t, True))}
    h, tokens = TINY.hidden_size, TINY.seq_length * TINY.micro_batch_size
    assert by_name["QKV projection"].bytes == 2 * (tokens * h + 3 * h * h // t + 3 * tokens * h // t)
    assert by_name["attention projection"].bytes == 2 * (tokens * h // t + h * h // t + tokens * h)
    assert by_name["h→4h"].bytes == 2 * (tokens * h + 4 * h * h // t + 4 * tokens * h // t)
    assert by_name["4h→h"].bytes == by_name["h→4h"].bytes
    assert by_name["GeLU"].bytes == 2 * 2 * tokens * 4 * h // t


def test_the_longer_of_computing_and_moving():
    slow, fast = Operation("slow", 10, 100, False), Operation("fast", 1000, 100, True)
    assert slow.least_seconds(100, 50) == 2 and slow.bound_by_memory(100, 50)
    assert fast.least_seconds(100, 50) == 10 and not fast.bound_by_memory(100, 50)
    assert least_seconds([slow, fast], 100, 50) == 12
    assert slow.intensity == Fraction(1, 10)
