"""Tables of text: every number in full, columns in line."""

import re
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from actmem.config import Parallel
from actmem.formulas.activations import eq1, layer_extra_rows, layer_rows
from actmem.models import TINY
from actmem.rows import LAYER_TERMS
from actmem_course.show.terms import BLOCKS, KINDS, TERMS, formula_of, term_of
from actmem_course.show.text import (
    extras_text,
    kept_text,
    saved_text,
    text_table,
)
from tests.shapes import shapes


def test_text_table():
    table = text_table(("name", "n"), [("a", 1), ("bcd", 12345)], " r", last_is_sum=True)
    assert table == "name       n\n────────────\na          1\n────────────\nbcd   12,345"


def test_an_empty_table_is_its_header():
    assert text_table(("name", "n"), []) == "name  n\n───────"


def test_extras_text_gives_reasons():
    text = extras_text(layer_rows(TINY) + layer_extra_rows(TINY))
    assert len(text.splitlines()) == 2 + len(layer_extra_rows(TINY))
    assert all(row.extra in text for row in layer_extra_rows(TINY))


def test_saved_text_shows_what_the_ledger_saw():
    saved = [
        SimpleNamespace(module="up", op="linear", argument="0", shape=(3, 4), dtype="torch.bfloat16", bytes=24),
        SimpleNamespace(module="", op="softmax", argument="", shape=(), dtype="torch.float32", bytes=4),
    ]
    lines = saved_text(saved).splitlines()
    assert lines[2].split() == ["up", "linear", "argument", "0", "[3,", "4]", "bfloat16", "24"]
    assert lines[3].split() == ["(itself)", "softmax", "made", "by", "it", "[]", "float32", "4"]
    assert lines[-1].split() == ["together", "28"]
    assert kept_text(saved) == (
        "linear keeps argument 0, [3, 4] bfloat16: 24 bytes\nsoftmax keeps what it made, [] float32: 4 bytes"
    )


def test_an_empty_ledger_says_so():
    assert saved_text([]) == kept_text([]) == "nothing is kept"


# What is said about each term agrees with the formulas.


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
