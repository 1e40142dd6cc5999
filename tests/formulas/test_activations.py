"""Named tensors against closed forms and table 2, and both against the paper's formulas as printed."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from actmem.config import ModelShape
from actmem.formulas.activations import (
    CORE_ATTENTION_TERMS,
    TABLE2,
    closed_form,
    crossover_seq_length,
    layer_extra_rows,
    layer_rows,
)
from actmem.recipes import PAPER_LAYER, RECOMPUTE_MODES
from actmem.rows import LAYER_TERMS, extra_rows, total
from tests.shapes import layer_cuts

ELEMENT_SIZES = st.sampled_from([2, 4, 8])


def printed(shape, coefficient):
    """sbh times one of the paper's brackets."""
    return shape.seq_length * shape.micro_batch_size * shape.hidden_size * coefficient


def core(shape):
    """5as/h."""
    return Fraction(5 * shape.num_attention_heads * shape.seq_length, shape.hidden_size)


@given(layer_cuts(), st.sampled_from(RECOMPUTE_MODES), ELEMENT_SIZES)
def test_recomputation_only_leaves_rows_out(cut, recompute, e):
    shape, parallel = cut
    whole = layer_rows(shape, parallel, "none", e)
    assert [row.term for row in whole] == list(LAYER_TERMS)
    kept = layer_rows(shape, parallel, recompute, e)
    assert [row for row in whole if row in kept] == kept
    dropped = {row.term for row in whole} - {row.term for row in kept}
    if recompute == "none":
        assert dropped == set()
    elif "selective" in recompute:
        assert dropped == set(CORE_ATTENTION_TERMS)
    elif recompute == "elementwise":
        assert dropped == set(CORE_ATTENTION_TERMS) | {r.term for r in PAPER_LAYER.recipes if not r.matmuls}
    else:
        assert dropped == set(LAYER_TERMS) - {"layer-norm 1 input"}


@given(layer_cuts())
def test_every_rank_together_holds_each_tensor_split_by_times(cut):
    shape, parallel = cut
    whole = layer_rows(shape)
    for row, full in zip(layer_rows(shape, parallel), whole):
        assert row.bytes * row.split_by == full.bytes
        assert row.split_by in (1, parallel.tensor_parallel_size)
    if parallel.sequence_parallel:
        assert {row.split_by for row in layer_rows(shape, parallel)} == {parallel.tensor_parallel_size}


@given(layer_cuts(), st.sampled_from(RECOMPUTE_MODES), ELEMENT_SIZES, st.sampled_from(["cpu", "cuda"]))
def test_every_extra_row_has_a_reason_and_statistics_are_two_numbers_a_token(cut, recompute, e, device):
    shape, parallel = cut
    rows = layer_extra_rows(shape, parallel, recompute, e, device)
    assert rows and extra_rows(rows) == rows
    number = max(e, 4) if device == "cuda" else e
    size = 2 * shape.seq_length * shape.micro_batch_size // parallel.sequence_parts * number
    assert {row.bytes for row in rows if "statistics" in row.term} <= {size}


def test_crossover():
    s = crossover_seq_length(hidden_size=12288, num_attention_heads=96)
    shape = ModelShape(1, 1, 12288, 96)
    below, above = shape.with_sizes(seq_length=int(s)), shape.with_sizes(seq_length=int(s) + 1)
    assert core(below) < 34 < core(above)


PRINTED = {
    "none": lambda t, core: 34 + core,
    "tensor": lambda t, core: 10 + Fraction(24, t) + core / t,
    "tensor+sequence": lambda t, core: Fraction(34, t) + core / t,
    "tensor+selective": lambda t, core: 10 + Fraction(24, t),
    "tensor+sequence+selective": lambda t, core: Fraction(34, t),
    "full": lambda t, core: 2,
}


@given(layer_cuts(), st.sampled_from(TABLE2), ELEMENT_SIZES)
def test_rows_add_up_to_the_closed_form_and_that_is_the_printed_one(cut, configuration, e):
    shape, t = cut[0], cut[1].tensor_parallel_size
    rows = layer_rows(shape, configuration.parallel(t), configuration.recompute, e)
    assert total(rows) == closed_form(configuration, shape, t, e)
    assert closed_form(configuration, shape, t) == printed(shape, PRINTED[configuration.name](t, core(shape)))
