"""What is said about each term agrees with the formulas."""

import re

from hypothesis import given
from hypothesis import strategies as st

from actmem.config import Parallel
from actmem.formulas.activations import eq1, layer_extra_rows, layer_rows
from actmem.models import TINY
from actmem.rows import LAYER_TERMS
from actmem_course.show.terms import BLOCKS, KINDS, TERMS, formula_of, term_of
from tests.shapes import shapes


def test_the_terms_are_the_layers_in_order():
    assert tuple(TERMS) == LAYER_TERMS


def test_every_kind_and_block_is_known():
    assert {term.kind for term in TERMS.values()} | {"extra"} == set(KINDS)
    assert {term.block for term in TERMS.values()} | {"extra"} == set(BLOCKS)
    assert all(term.why for term in TERMS.values())


def coefficients(rows, shape):
    """Sums of the coefficients of sbh and of as²b in the rows' formulas."""
    sums = {"sbh": 0, "as²b": 0}
    for row in rows:
        number, letters = re.fullmatch(r"(\d*)(sbh|as²b)(?:/t)?", formula_of(row, shape)).groups()
        sums[letters] += int(number or 1)
    return sums


@given(shapes())
def test_formulas_add_up_to_equation_1(shape):
    found = coefficients(layer_rows(shape), shape)
    assert found == {"sbh": 34, "as²b": 5}
    a, b, h, s = shape.letters()
    assert found["sbh"] * s * b * h + found["as²b"] * a * s * s * b == eq1(shape)


@given(shapes(divisible_by=4), st.booleans())
def test_what_ranks_share_has_a_t(shape, sequence_parallel):
    for row in layer_rows(shape, Parallel(4, sequence_parallel)):
        assert formula_of(row, shape).endswith("/t") == (row.split_by == 4)


def test_blocks_add_up_as_in_section_41():
    blocks = {
        block: coefficients([r for r in layer_rows(TINY) if term_of(r).block == block], TINY) for block in BLOCKS[:3]
    }
    assert blocks == {
        "layer norms": {"sbh": 4, "as²b": 0},
        "attention": {"sbh": 11, "as²b": 5},
        "MLP": {"sbh": 19, "as²b": 0},
    }


def test_extras_have_their_own_reason_and_no_formula():
    for row in layer_extra_rows(TINY):
        assert (term_of(row).kind, term_of(row).why, formula_of(row, TINY)) == ("extra", row.extra, "")


def test_a_row_that_is_no_multiple_gets_no_formula():
    row = layer_rows(TINY)[0]
    assert formula_of(type(row)(row.term, row.bytes + 1), TINY) == ""
