"""Parameter counts against the real model, cut in every way; bytes of optimizer state."""

import pytest
import torch

from actmem.config import PAPER_MODELS, TINY, ModelShape, Parallel
from actmem.formulas.states import ADAM, num_parameters, parameter_counts, state_rows
from actmem.layers.gpt import GPT
from actmem.parallel.groups import TensorParallel
from actmem.rows import total

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
