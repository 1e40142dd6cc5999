"""Table 2: rows, closed forms and the printed brackets, for random shapes and the paper's models."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.formulas.activations import TABLE2, closed_form, layer_rows
from actmem.models import PAPER_MODELS
from actmem.rows import total
from tests.formulas.cuts import layer_cuts

PRINTED = {
    "none": lambda t, core: 34 + core,
    "tensor": lambda t, core: 10 + Fraction(24, t) + core / t,
    "tensor+sequence": lambda t, core: Fraction(34, t) + core / t,
    "tensor+selective": lambda t, core: 10 + Fraction(24, t),
    "tensor+sequence+selective": lambda t, core: Fraction(34, t),
    "full": lambda t, core: 2,
}


@given(layer_cuts(), st.sampled_from(TABLE2), st.sampled_from([2, 4, 8]))
def test_rows_add_up_to_the_closed_form(cut, configuration, e):
    shape, t = cut[0], cut[1].tensor_parallel_size
    rows = layer_rows(shape, configuration.parallel(t), configuration.recompute, e)
    assert total(rows) == closed_form(configuration, shape, t, e)


@given(layer_cuts(), st.sampled_from(TABLE2))
def test_closed_form_is_the_printed_one(cut, configuration):
    shape, t = cut[0], cut[1].tensor_parallel_size
    a, b, h, s = shape.letters()
    bracket = PRINTED[configuration.name](t, Fraction(5 * a * s, h))
    assert closed_form(configuration, shape, t) == s * b * h * bracket


@pytest.mark.parametrize(
    ("model", "both", "full"),
    [("22B", 16.1, 7.6), ("175B", 18.5, 8.7), ("530B", 20.2, 9.5), ("1T", 20.2, 9.5)],
)
def test_percentages_of_the_tensor_parallel_baseline(model, both, full):
    """Section 6.1 says under 20% and about 10%; these are table 2's own."""
    shape, t = PAPER_MODELS[model].shape, PAPER_MODELS[model].parallel.tensor_parallel_size
    sizes = {c.name: closed_form(c, shape, t) for c in TABLE2}
    assert round(100 * sizes["tensor+sequence+selective"] / sizes["tensor"], 1) == both
    assert round(100 * sizes["full"] / sizes["tensor"], 1) == full
