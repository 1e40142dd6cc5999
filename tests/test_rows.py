"""Rows: adding up, splitting by who counts them, comparing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import ConfigError
from actmem.rows import LAYER_TERMS, Row, by_term, compare, extra_rows, merge, paper_rows, total

ROWS = st.lists(
    st.builds(
        Row,
        term=st.sampled_from(LAYER_TERMS),
        bytes=st.integers(0, 10**15),
        split_by=st.integers(1, 8),
        source=st.text(max_size=10),
        extra=st.sampled_from(["", "a reason"]),
    ),
    max_size=8,
)


@pytest.mark.parametrize("size", [1.0, "1", None, True])
def test_bytes_are_whole_numbers(size):
    with pytest.raises(ConfigError, match="^bytes: row 'Q' must hold a whole number, got"):
        Row("Q", size)


@given(ROWS)
def test_nothing_is_lost(rows):
    assert total(paper_rows(rows)) + total(extra_rows(rows)) == total(rows) == sum(by_term(rows).values())
    assert [row for row in rows if row in paper_rows(rows)] == paper_rows(rows)
    assert list(by_term(rows)) == list(dict.fromkeys(row.term for row in rows))


@given(ROWS, ROWS)
def test_compare_accounts_for_every_byte(predicted, measured):
    result = compare(predicted, measured)
    assert result.difference == total(measured) - total(predicted)
    found = [match.term for match in result.matches]
    assert len(found) == len(set(found))
    assert set(found) == {t for t, b in by_term(predicted + measured).items() if b}
    sums = {t: b for t, b in by_term(predicted).items() if b}, {t: b for t, b in by_term(measured).items() if b}
    assert result.exact == (sums[0] == sums[1])


@given(ROWS)
def test_merge_leaves_one_row_a_term(rows):
    merged = merge(rows)
    assert {row.term: row.bytes for row in merged} == by_term(rows) and len(merged) == len(by_term(rows))
    first = {row.term: row for row in reversed(rows)}
    assert all(row.extra == first[row.term].extra and row.split_by == first[row.term].split_by for row in merged)


def test_what_compare_says():
    predicted = [Row("Q", 1000), Row("K", 5), Row("V", 7), Row("causal mask", 0)]
    measured = [Row("Q", 1000), Row("K", 6), Row("a leak", 9)]
    result = compare(predicted, measured)
    assert [(m.term, m.predicted, m.measured, m.difference) for m in result.matches] == [
        ("Q", 1000, 1000, 0),
        ("K", 5, 6, 1),
        ("V", 7, None, -7),
        ("a leak", None, 9, 9),
    ]
    assert not result.exact and result.difference == 3
    assert result.describe().splitlines() == [
        "K: predicted 5 B, measured 6 B",
        "V: predicted 7 B, not measured",
        "a leak: measured 9 B, not predicted",
    ]
    assert compare(predicted, predicted).describe() == "all 3 terms agree to the byte"
