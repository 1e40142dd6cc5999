"""Tables of text: every number in full, columns in line."""

from fractions import Fraction
from types import SimpleNamespace

import pytest

from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.models import TINY
from actmem.rows import Row, compare
from actmem_course.show.text import (
    apart_text,
    comparison_text,
    extras_text,
    kept_text,
    saved_text,
    table2_text,
    text_table,
)


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


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        ([(7, 7), (8, 8)], "2 layers: 0 bytes apart"),
        ([(1000, 1001), (1001, 1000), (5, 5)], "3 layers: 2 bytes apart"),  # differences do not cancel
        ([(0, 1200)], "layers: 1,200 bytes apart"),
        ([(Fraction(4, 2), 2), (Fraction(1, 2), 0)], "2 layers: 0.5 bytes apart"),
    ],
)
def test_apart_text(pairs, line):
    assert apart_text("layers", iter(pairs)) == line


@pytest.mark.parametrize(
    ("predicted", "measured", "line"),
    [
        ([Row("Q", 1000)], [Row("Q", 1000)], "Q 1,000 1,000 0"),
        ([Row("Q", 1000)], [Row("Q", 1001)], "Q 1,000 1,001 1"),
        ([Row("Q", 1000)], [], "Q 1,000 – -1,000"),
        ([], [Row("Q", 1000)], "Q – 1,000 1,000"),
    ],
)
def test_comparison_text(predicted, measured, line):
    lines = comparison_text(compare(predicted, measured)).splitlines()
    assert " ".join(lines[2].split()) == line
    assert lines[-1].split()[0] == "together" and lines[-1].split()[-1] == line.split()[-1]


def test_table2_text_is_what_the_lab_wrote():
    result = {
        "configuration": "tensor",
        "formula": "10 + 24/t + 5as/ht",
        "predicted_bytes": 10,
        "extra_bytes": 2,
        "measured_bytes": 13,
        "difference_bytes": 1,
    }
    lines = table2_text([result]).splitlines()
    assert lines[2].split("  ")[0] == "tensor" and lines[2].split()[-4:] == ["10", "2", "13", "1"]
