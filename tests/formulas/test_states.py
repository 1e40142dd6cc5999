"""Parameter counts against the real model, cut in every way; bytes of optimizer state."""

import pytest
import torch
from hypothesis import given

from actmem.config import PAPER_MODELS, TINY, ModelShape, Parallel
from actmem.formulas.states import ADAM, num_parameters, parameter_counts, state_rows
from actmem.layers.gpt import GPT
from actmem.parallel.groups import TensorParallel
from actmem.rows import total
from tests.shapes import model_cuts

SHAPE = ModelShape(6, 1, 24, 4, num_layers=8, vocab_size=20)


def parts(parallel, rank):
    """The real model's parts that one pipeline rank holds, on no device."""
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    each = SHAPE.num_layers // (p * m)
    tp = TensorParallel(size=parallel.tensor_parallel_size, sequence_parallel=parallel.sequence_parallel)
    for chunk in range(m):
        start = (chunk * p + rank) * each
        yield GPT(SHAPE, tp, layers=range(start, start + each), device="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "parallel", [Parallel(t, False, p, m) for t in (1, 2) for p, m in [(1, 1), (2, 1), (4, 1), (2, 2)]], ids=str
)
def test_counts_are_those_of_the_real_model(parallel):
    for rank in range(parallel.pipeline_parallel_size):
        real = sum(x.numel() for part in parts(parallel, rank) for x in part.parameters())
        assert sum(parameter_counts(SHAPE, parallel, rank).values()) == real


@given(model_cuts())
def test_all_ranks_together_hold_the_model(cut):
    """Cut parameters once, whole ones t times; the word embedding twice where p > 1."""
    shape, parallel, _ = cut
    t, p = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    together: dict[str, int] = {}
    for rank in range(p):
        for name, count in parameter_counts(shape, parallel, rank).items():
            cut_by_t = name in ("layer weights", "layer biases, cut", "word embedding")
            together[name] = together.get(name, 0) + count * (t if cut_by_t else 1)
    if p > 1:
        together["word embedding"] //= 2
    assert sum(together.values()) == num_parameters(shape)


@pytest.mark.parametrize(("model", "billions"), [("22B", 22), ("175B", 175), ("530B", 530), ("1T", 1008)])
def test_the_papers_models_are_as_large_as_their_names(model, billions):
    assert round(num_parameters(PAPER_MODELS[model].shape) / 10**9) == billions


@pytest.mark.parametrize(
    ("adam", "bytes_each"), [("float32 gradients", 18), ("16-bit gradients", 20), ("16-bit gradients, no copy", 16)]
)
def test_bytes_of_one_parameter(adam, bytes_each):
    rows = state_rows(TINY, adam=adam)
    assert total(rows) == bytes_each * num_parameters(TINY)
    assert [row.term for row in rows] == [state.term for state in ADAM[adam]]
