"""torch.compile of a layer: gradients equal eager's in every mode; dropout and recomputed regions stay eager."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel, tensor_parallel

SHAPE = ModelShape(8, 2, 24, 4)


def layer_step(tp, mode, backend=None):
    """Output and all gradients of one layer; with a backend, compiled, and how many graphs that took."""
    torch.manual_seed(0)
    layer = TransformerLayer(SHAPE, tp, recompute=mode, dtype=torch.float64)
    own = 8 // tp.size if tp.sequence_parallel else 8
    x = torch.randn(own, 2, 24, dtype=torch.float64, requires_grad=True)
    counter = CompileCounterWithBackend(backend or "eager")
    torch._dynamo.reset()
    y = (torch.compile(layer, backend=counter) if backend else layer)(x)
    y.backward(y.detach())
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())], counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "mode"),
    [("eager", "none"), ("eager", "full"), ("eager", "paper-selective"), ("aot_eager", "selective")],
)
def test_gradients_equal_those_of_the_eager_layer(backend, mode):
    expected, _ = layer_step(TensorParallel(), mode)
    found, graphs = layer_step(TensorParallel(), mode, backend)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # A layer that recomputes all of itself has nothing left to compile.
    assert (graphs == 0) == (mode == "full")


def compiled_ranks():
    tp = tensor_parallel(sequence_parallel=True)
    expected, _ = layer_step(tp, "selective")
    found, graphs = layer_step(tp, "selective", "aot_eager")
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), graphs > 0


def test_two_ranks(pools):
    assert pools[2].run(compiled_ranks) == [(True, True)] * 2
