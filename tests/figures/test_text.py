"""Tables and lines of text: every number in full, columns in line, a wrong line in red; what a fold opens."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import TINY, Parallel
from actmem.formulas.activations import eq1, layer_rows
from actmem.rows import LAYER_TERMS, Row
from actmem_course.figures.checks import Checks, Fold
from actmem_course.figures.terms import TERMS, formula_of
from actmem_course.figures.text import saved_text, text_table
from actmem_more.llama_shape import LLAMA_MODELS, llama_layer_terms
from tests.shapes import shapes


def test_text_table():
    table = text_table(("name", "n"), [("a", 1), ("bcd", 12345)], " r", last_is_sum=True)
    assert table == "name       n\n────────────\na          1\n────────────\nbcd   12,345"
    assert saved_text([]) == "nothing is saved"


# What is said about each term agrees with the formulas.


def test_the_table_has_the_terms_of_the_papers_layer_and_of_todays():
    assert tuple(TERMS)[: len(LAYER_TERMS)] == LAYER_TERMS
    today = {recipe.term for shape in LLAMA_MODELS.values() for recipe in llama_layer_terms(shape).recipes}
    assert today <= TERMS.keys()


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
    a, b, h, s = shape.letters()
    assert found["sbh"] * s * b * h + found["as²b"] * a * s * s * b == eq1(shape)


@given(shapes(divisible_by=4), st.booleans())
def test_what_ranks_share_has_a_t(shape, sequence_parallel):
    for row in layer_rows(shape, Parallel(4, sequence_parallel)):
        assert formula_of(row, shape).endswith("/t") == (row.split_by == 4)


def test_a_row_that_is_no_multiple_gets_no_formula():
    row = layer_rows(TINY)[0]
    assert formula_of(type(row)(row.term, row.bytes + 1), TINY) == ""


def test_a_fold_is_stored_as_its_line_and_shows_the_rest_as_it_is_written():
    fold = Fold("two of three", "a < b\n  c & d")
    assert repr(fold) == "two of three"
    assert fold._repr_html_().count("two of three") == 1 and "a &lt; b\n  c &amp; d" in fold._repr_html_()


def test_what_a_cell_compared_stands_under_it_with_the_difference():
    checks = Checks()
    checks.add("a layer", [(1_769_472, 1_769_472)])
    checks.add("ranks", [(4, 4), (Fraction(6, 2), 3)], "FLOPs", sides=("by formula", "by torch"))
    checks.add("under a thousandth", [(True, True)], "")
    assert repr(checks.show()).splitlines() == [
        "✓ 0 apart a layer: predicted 1,769,472 · counted 1,769,472 bytes",
        "✓ 0 apart ranks: by formula 4 | 3 · by torch 4 | 3 FLOPs",
        "✓ under a thousandth",
    ]
    assert repr(checks.show()) == "", "each is shown once"
    assert repr(checks) == "✓ 0 apart predicted = counted: 3 of 3"


def test_a_difference_is_loud_and_differences_do_not_cancel():
    checks = Checks()
    checks.add("two layers", [(2000, 2001), (2001, 2000)])
    lines = checks.show()
    assert repr(lines) == "✗ 2 apart two layers: predicted 2,000 | 2,001 · counted 2,001 | 2,000 bytes"
    assert 'role="alert"' in lines._repr_html_() and "2,000 and 2,001 bytes" in lines._repr_html_()
    assert repr(checks) == "✗ 1 of 1 comparisons are apart predicted = counted: 0 of 2"
    assert "#FDE7E9" in checks._repr_html_() and "2,000 and 2,001 bytes" in checks.summary().details


def test_rows_are_compared_term_by_term_and_a_false_statement_is_wrong():
    checks = Checks()
    checks.add_rows("a stage", [Row("norm", 4), Row("GeLU", 0)], [Row("norm", 4), Row("mask", 7)])
    checks.add("within rounding", [(True, True), (True, False)], "")
    assert repr(checks.show()).splitlines() == [
        "✗ 7 apart a stage: predicted 4 · counted 11 bytes (1 of 2)",
        "✗ 1 of 2 differ within rounding",
    ]


def test_more_than_three_comparisons_are_one_line_with_the_rest_in_a_fold():
    checks = Checks()
    for size in range(4):
        checks.add(f"size {size}", [(size, size)])
    shown = checks.show()
    assert repr(shown) == "✓ 0 apart predicted = counted: 4 of 4"
    assert isinstance(shown, Fold) and shown.details.splitlines()[2] == "size 2: predicted 2 · counted 2 bytes: 0 apart"


def test_sizes_of_tensors_are_said_too_and_nothing_to_compare_is_refused():
    checks = Checks()
    with pytest.raises(ValueError, match="sockets: there is nothing to compare"):
        checks.add("sockets", [])
    checks.add("shapes", [([1, 2], [1, 3]), ([4], [4])], "")
    assert repr(checks.show()).splitlines() == ["✗ 1 of 2 differ shapes: 1 of 2 equal"]
