"""The compiled layer computes what ours computes and keeps other bytes.  Without code generation, to be quick."""

from typing import Any

import pytest
import torch

from actmem.config import ModelShape
from actmem.measure.emulate import emulated_rank
from actmem.measure.ledger import record
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.peers.compiled import compiled_layer

SHAPE = ModelShape(16, 2, 32, 4)
#: torch.compile's own choice of what to keep, run operation by operation.
BACKEND = "aot_eager_decomp_partition"


def test_same_numbers_and_other_bytes():
    with emulated_rank(2, real_tensors=True):
        tp = tensor_parallel(sequence_parallel=True)
        compiled = compiled_layer(SHAPE, tp, p=0.0, dtype=torch.float64, backend=BACKEND)
        x = torch.randn(8, 2, 32, dtype=torch.float64, requires_grad=True)
        results = []
        modules: tuple[Any, ...] = (compiled.layer, compiled)
        for module in modules:
            with record(module) as ledger:
                y = module(x)
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
            results.append((y, grad, ledger))
    (y, grad, ours), (y_compiled, grad_compiled, theirs) = results
    assert torch.allclose(y, y_compiled, rtol=0, atol=1e-12) and torch.allclose(grad, grad_compiled, rtol=0, atol=1e-12)
    assert any(saved.op == "CompiledFunction" for saved in theirs.saved)
    # The normalised softmax is no longer kept, but what it is made of.
    assert theirs.total_bytes != ours.total_bytes


def test_what_it_cannot_do_is_said():
    with emulated_rank(2, real_tensors=True):
        with pytest.raises(PeerUnavailable, match="chooses by itself"):
            compiled_layer(SHAPE, tensor_parallel(sequence_parallel=True), "selective")
        with pytest.raises(PeerUnavailable, match="one stream of random numbers"):
            compiled_layer(SHAPE, tensor_parallel())
