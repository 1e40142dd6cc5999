"""Prediction equals measurement: every row of table 2, every t, both dtypes, random shapes."""

import measure_table2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import PAPER_MODELS, TINY, Parallel
from actmem.formulas.activations import TABLE2, gathered_input_bytes, layer_extra_rows, layer_rows
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.measure_layer import layer_input, layer_rows_of, measure_layer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import compare, total
from actmem_course.ranks import Ranks
from tests.shapes import shapes
from tests.tiers import examples

DTYPES = [torch.bfloat16, torch.float32]


def on_ranks(dtype):
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), "cpu", emulated=False)
    return [measure_table2.measure(TINY, one, ranks, dtype) for one in TABLE2]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks(pools, size, dtype):
    for results in pools[size].run(on_ranks, dtype):
        assert [row["disagreement"] for row in results if not row["exact"]] == []
        assert [row["difference_bytes"] for row in results] == [0] * len(TABLE2)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("model", PAPER_MODELS)
def test_paper_models_emulated(model):
    with emulated_rank(8):
        shape, here = PAPER_MODELS[model].shape, Ranks(0, 8, "cpu", emulated=True)
        results = [measure_table2.measure(shape, one, here, torch.bfloat16) for one in TABLE2]
    assert [row["disagreement"] for row in results if not row["exact"]] == []


@pytest.mark.slow
@examples(5, at_night=25)
@given(shape=shapes(), dtype=st.sampled_from(DTYPES), recompute=st.sampled_from(["none", "selective", "full"]))
def test_random_shapes_on_real_tensors(shape, dtype, recompute):
    measured = measure_layer(shape, recompute=recompute, dtype=dtype)
    predicted = layer_rows(shape, recompute=recompute, element_size=dtype.itemsize)
    extra = layer_extra_rows(shape, recompute=recompute, element_size=dtype.itemsize)
    assert compare(predicted + extra, measured).exact


@pytest.mark.slow
@examples(6, at_night=40)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), sequence=st.booleans(), t=st.sampled_from([1, 2, 3, 4, 8]))
def test_random_shapes_on_any_number_of_ranks(data, dtype, sequence, t):
    shape = data.draw(shapes(divisible_by=t))
    recompute = data.draw(st.sampled_from(["none", "selective", "full", "paper-selective", "paper-full"]))
    rank = data.draw(st.integers(0, t - 1))
    with emulated_rank(t, rank):
        measured = measure_layer(shape, tensor_parallel(sequence_parallel=sequence), recompute, dtype=dtype)
    parallel = Parallel(t, sequence)
    predicted = layer_rows(shape, parallel, recompute, dtype.itemsize)
    extra = layer_extra_rows(shape, parallel, recompute, dtype.itemsize)
    comparison = compare(predicted + extra, measured)
    assert comparison.exact, comparison.describe()


@pytest.mark.parametrize("t", [2, 4, 8])
def test_plain_sequence_parallelism_keeps_the_gathered_input(t):
    shape = PAPER_MODELS["22B"].shape
    with emulated_rank(t):
        tp = tensor_parallel(sequence_parallel=True, keep_gathered_input=True)
        measured = measure_layer(shape, tp)
    parallel = Parallel(t, True)
    kept = total(layer_rows(shape, parallel)) + total(layer_extra_rows(shape, parallel))
    assert total(measured) == kept + gathered_input_bytes(shape, t)


def test_a_leak_is_found():
    """A layer that keeps one tensor more than the formula must not compare as exact."""

    class Leaky(TransformerLayer):
        def forward(self, x):  # type: ignore[override]  # called with x alone
            return super().forward(x * x)  # the product's gradient needs x

    layer = Leaky(TINY)
    x = layer_input(TINY, TensorParallel(), "cpu", torch.float32)
    predicted = layer_rows(TINY, element_size=4) + layer_extra_rows(TINY, element_size=4)
    comparison = compare(predicted, layer_rows_of(layer, x))
    assert [match.term for match in comparison.unequal] == ["root: mul 0"]
    assert comparison.difference == x.numel() * 4
