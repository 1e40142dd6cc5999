"""The step model: where the larger microbatch breaks even, and its two ends."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import ConfigError
from actmem.formulas.activations import eq1
from actmem.formulas.flops import layer_overhead
from actmem.models import PAPER_MODELS, TINY
from actmem_course.others.larger_batches import batch_factor, break_even, fullest_bytes, throughput
from tests.shapes import shapes

MODES = ("selective", "paper-selective", "full", "paper-full")


@given(shapes(), st.integers(2, 9), st.sampled_from(MODES))
def test_throughput_is_1_at_the_break_even(shape, layers, mode):
    deep = shape.with_sizes(num_layers=layers)
    assert throughput(deep, mode, break_even(deep, mode)) == 1


@given(shapes(), st.sampled_from(MODES))
def test_without_a_fixed_part_recomputation_only_costs(shape, mode):
    assert throughput(shape, mode, Fraction(0)) == 1 / (1 + layer_overhead(shape, mode))


@given(shapes())
def test_one_layer_needs_all_its_bytes_at_its_fullest(shape):
    assert [fullest_bytes(shape, mode) for mode in ("none", *MODES)] == [eq1(shape)] * 5


def test_nothing_breaks_even_where_nothing_is_freed():
    with pytest.raises(ConfigError, match="frees nothing"):
        break_even(TINY.with_sizes(num_layers=1), "full")


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_full_frees_more_and_breaks_even_later(name):
    shape = PAPER_MODELS[name].shape
    assert batch_factor(shape, "full") > batch_factor(shape, "selective") > 1
    assert break_even(shape, "full") > break_even(shape, "selective") > 0
