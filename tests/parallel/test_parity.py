"""The sharded layer computes what the unsharded layer computes, in every mode, and compiled what it computes eagerly."""

import itertools

import pytest
import torch
from measure_parity import FORMS as LABS_FORMS
from torch._dynamo.testing import CompileCounterWithBackend

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.collectives import all_gather
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense, reduce_partial_gradients
from actmem.recipes import RECOMPUTE_MODES
from tests.gradients import gradient_pairs
from tests.tiers import covering

SHAPE = ModelShape(seq_length=12, micro_batch_size=3, hidden_size=24, num_attention_heads=4)
FORMS = LABS_FORMS | {"tensor, plain autograd": {"keep_gathered_input": True}}


def layer_and_input(tp, recompute, p):
    """The same weights on every rank, cut for ``tp``, and this rank's part of one input."""
    torch.manual_seed(7)
    dense = TransformerLayer(SHAPE, p=0.0, dtype=torch.float64)
    for parameter in dense.parameters():  # biases and norms too, or their errors would hide
        torch.nn.init.normal_(parameter, std=0.3)
    full = torch.randn(12, 3, 24, dtype=torch.float64)
    layer = TransformerLayer(SHAPE, tp, recompute=recompute, p=p, dtype=torch.float64)
    load_dense(layer, dense.state_dict(), tp)
    x = full.chunk(tp.size)[tp.rank] if tp.sequence_parallel else full
    return layer, x.clone().requires_grad_(), dense, full.clone().requires_grad_()


def loss_weights(like):
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view_as(like)


def largest_error(form, recompute):
    """Over the output and every gradient, against the unsharded layer, on this rank."""
    tp = tensor_parallel(**FORMS[form]) if torch.distributed.is_initialized() else TensorParallel(**FORMS[form])
    layer, x, dense, full = layer_and_input(tp, recompute, p=0.0)
    y_dense = dense(full)
    (y_dense * loss_weights(y_dense)).sum().backward()
    weights = loss_weights(y_dense)
    y = layer(x)
    (y * (weights.chunk(tp.size)[tp.rank] if tp.sequence_parallel else weights)).sum().backward()
    reduce_partial_gradients(layer, tp)

    y, grad_x = (all_gather(part, tp) if tp.sequence_parallel else part for part in (y.detach(), x.grad))
    pairs = [(y, y_dense.detach()), (grad_x, full.grad), *gradient_pairs(layer, dense, tp)]
    assert len(pairs) == 2 + len(list(dense.parameters()))
    return max(((a - b).abs() / b.abs().clamp_min(1.0)).max().item() for a, b in pairs)


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
@pytest.mark.parametrize("form", FORMS)
def test_one_rank(form, recompute):
    assert largest_error(form, recompute) < 1e-12


@pytest.mark.by_day(18)
@pytest.mark.parametrize(("size", "form", "recompute"), covering([2, 4], FORMS, RECOMPUTE_MODES))
def test_sharded_equals_unsharded(pools, size, form, recompute):
    assert max(pools[size].run(largest_error, form, recompute)) < 1e-12


def gradients_with_dropout(form, recompute):
    tp = tensor_parallel(**FORMS[form])
    layer, x, _, _ = layer_and_input(tp, recompute, p=0.3)
    for _ in range(2):  # the second step starts from the generators' state after the first
        y = layer(x)
        (y * loss_weights(y)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("form", FORMS)
def test_with_dropout_recomputation_changes_no_bit(pools, form):
    plain = pools[2].run(gradients_with_dropout, form, "none")
    for recompute in RECOMPUTE_MODES[1:]:
        again = pools[2].run(gradients_with_dropout, form, recompute)
        for ours, theirs in itertools.chain.from_iterable(zip(a, b) for a, b in zip(again, plain)):
            assert torch.equal(ours, theirs)


def output_with_dropout(form):
    tp = tensor_parallel(**FORMS[form])
    layer, x, _, _ = layer_and_input(tp, "none", p=0.5)
    attention_mask = layer.attention_dropout(x)._mask
    scores_mask = layer.attention.core.dropout_mask(torch.empty(6, 12, 12))._mask
    return layer(x).detach(), attention_mask, scores_mask


def test_replicated_tensors_are_dropped_alike_and_shards_are_not(pools):
    (y0, block0, scores0), (y1, block1, scores1) = pools[2].run(output_with_dropout, "tensor")
    assert torch.equal(y0, y1) and torch.equal(block0, block1) and not torch.equal(scores0, scores1)
    (_, block0, scores0), (_, block1, scores1) = pools[2].run(output_with_dropout, "tensor+sequence")
    assert not torch.equal(block0, block1) and not torch.equal(scores0, scores1)


def layer_step(tp, mode, backend=None):
    """Output and all gradients of one layer; with a backend, compiled, and how many graphs that took."""
    torch.manual_seed(0)
    layer = TransformerLayer(SHAPE, tp, recompute=mode, dtype=torch.float64)
    x = torch.randn(12 // tp.sequence_parts, 3, 24, dtype=torch.float64, requires_grad=True)
    counter = CompileCounterWithBackend(backend or "eager")
    torch._dynamo.reset()
    y = (torch.compile(layer, backend=counter) if backend else layer)(x)
    y.backward(y.detach())
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())], counter.frame_count


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "mode"),
    [("eager", "none"), ("eager", "full"), ("eager", "paper-selective"), ("aot_eager", "selective")],
)
def test_compiled_gradients_equal_those_of_the_eager_layer(backend, mode):
    expected, _ = layer_step(TensorParallel(), mode)
    found, graphs = layer_step(TensorParallel(), mode, backend)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # A layer that recomputes all of itself has nothing left to compile.
    assert (graphs == 0) == (mode == "full")


def compiled_ranks():
    tp = tensor_parallel(sequence_parallel=True)
    (expected, _), (found, graphs) = (layer_step(tp, "selective", backend) for backend in (None, "aot_eager"))
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True)) and graphs > 0


@pytest.mark.nightly
def test_compiled_on_two_ranks(pools):
    assert all(pools[2].run(compiled_ranks))
