"""Colours that can be told apart and read, and sizes in words."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem_course.figures.style import CARD, FILLS, INK, WARNING
from actmem_course.figures.terms import KINDS
from actmem_course.figures.units import axis_end, axis_unit, size_text, three_digits


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_every_kind_has_a_fill_of_its_own():
    assert len({FILLS[kind].colour for kind in KINDS}) == len(KINDS)


def test_no_two_kinds_differ_by_colour_alone():
    """The two plain fills differ in brightness as well, which no colour blindness hides."""
    for one, other in combinations([FILLS[kind] for kind in KINDS], 2):
        assert one.pattern != other.pattern or contrast(one.colour, other.colour) > 1.5


def test_text_can_be_read():
    for kind, fill in FILLS.items():
        assert contrast(fill.colour, fill.text) >= 4.5, kind
    assert contrast(INK, CARD) >= 4.5 and contrast(WARNING, CARD) >= 4.5


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (2868903936, "2.67 GiB"),
        (2**40, "1,024 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_size_text(size, text):
    assert size_text(size) == text


@given(st.floats(1e-6, 1e12))
def test_three_digits_keep_the_number_to_half_a_percent_and_no_exponent(value):
    text = three_digits(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051)


@given(st.floats(1e-9, 1e15))
def test_an_axis_ends_above_its_largest_value_but_not_far(value):
    assert value <= axis_end(value) * (1 + 1e-12)
    assert axis_end(value) <= 2 * value * (1 + 1e-9)


@pytest.mark.parametrize(
    ("largest", "name"), [(2**32, "GiB"), (2**30, "GiB"), (2**30 - 1, "MiB"), (2**10, "KiB"), (5, "bytes")]
)
def test_axis_unit(largest, name):
    unit, unit_name = axis_unit(largest)
    assert unit_name == name and largest / unit >= 1
