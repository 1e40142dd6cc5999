"""Colours that can be told apart and read, and sizes in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem_course.figures.units import axis_end, axis_unit, size_text, three_digits


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
