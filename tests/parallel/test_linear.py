"""The linears: sizes, what a frozen weight keeps, autocast, no second derivatives; loading unsharded weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure_parity import FORMS
from torch import nn

from actmem.config import ConfigError, ModelShape
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.census import LiveStorages
from actmem.ledger.comms import count_collectives
from actmem.ledger.recorder import record
from actmem.parallel.collectives import all_gather
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel, load_dense
from actmem.parallel.vocab import VocabParallelCrossEntropy
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape

SHAPE = ModelShape(8, 2, 24, 4, num_layers=2, vocab_size=20)


@pytest.mark.parametrize(
    "module",
    [
        TransformerLayer(SHAPE, p=0.0),
        LlamaLayer(LlamaShape(8, 2, 24, 4, 2, 20)),
        VocabParallelCrossEntropy(TensorParallel()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_second_derivatives_are_refused_and_not_silently_wrong(module):
    """torch's own ``once_differentiable`` says nothing where the inputs are named, as here."""
    x = torch.randn(8, 2, 24, requires_grad=True)
    targets = [torch.zeros(8, 2, dtype=torch.int64)] if isinstance(module, VocabParallelCrossEntropy) else []
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(module(x, *targets).sum(), x, create_graph=True)


@pytest.mark.parametrize("form", [TensorParallel(), TensorParallel(keep_gathered_input=True)])
def test_a_bias_of_several_weights_is_refused(form):
    weights = torch.randn(2, 4, 24, requires_grad=True)
    with pytest.raises(ConfigError, match="^bias: belongs to a single weight, got 2 weights$"):
        column_parallel(torch.randn(8, 2, 24), form, *weights, bias=torch.zeros(4))


def kept_bytes(form, frozen):
    tp = tensor_parallel(**FORMS[form])
    column, row = ColumnParallelLinear(6, 8, tp), RowParallelLinear(8, 6, tp)
    if frozen:
        column.weight.requires_grad_(False)
        row.weight.requires_grad_(False)
    x = torch.randn(4, 2, 6, requires_grad=True)
    both = nn.Sequential(column, row)
    with record(both) as ledger:
        y = both(x)
    y.sum().backward()
    assert column.bias.grad is not None and x.grad is not None and (column.weight.grad is None) == frozen
    return sum(saved.bytes for saved in ledger.saved)


@pytest.mark.parametrize("form", FORMS)
def test_a_frozen_weight_keeps_no_input(pools, form):
    for size in pools[2].run(kept_bytes, form, False):
        gathered = 2 if form == "tensor+sequence, plain" else 1
        tokens = 8 if "sequence" in form else 4  # that the row-parallel linear sees, of which each rank gives 4
        assert size == 4 * (4 * 2 * 6 * gathered + tokens * 2 * 8 // 2)
    assert pools[2].run(kept_bytes, form, True) == [0, 0]


def peak_of_backward():
    tp = tensor_parallel(sequence_parallel=True)
    linear, x = ColumnParallelLinear(6, 8, tp), torch.randn(16, 2, 6, requires_grad=True)
    alive = LiveStorages([x, *linear.parameters()])
    peaks = []
    for _ in range(20):  # gloo's thread may hold what a collective read a moment longer
        with alive:
            y = linear(x)
            alive.peak_bytes = 0
            y.backward(torch.ones_like(y))
        peaks.append(alive.peak_bytes)
        x.grad = linear.weight.grad = linear.bias.grad = None
    return min(peaks)


def test_the_peak_of_backward_is_the_last_weights_gradient(pools):
    """What gloo received is added up after all else is gone."""
    tokens, own = 2 * 16 * 2, 8 // 2
    outputs_and_gradients, gathered_and_its_gradient, received = 2 * tokens * own, 2 * tokens * 6, tokens * 6
    peak = outputs_and_gradients + gathered_and_its_gradient + received + own * 6 + own
    assert pools[2].run(peak_of_backward) == [4 * peak] * 2


def under_autocast(form):
    tp = tensor_parallel(**FORMS[form])
    linear = ColumnParallelLinear(6, 8, tp, seed=1)
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    with count_collectives() as seen:
        with record(linear) as ledger, torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        y.sum().backward()
    gathered = {c.payload_bytes for c in seen.collectives if c.kind == "all-gather"}
    # By hand: a linear whose input and weight are rounded to 16 bits.
    full = all_gather(x.detach(), tp) if tp.sequence_parallel else x.detach()
    expected = F.linear(full.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16())
    grad = torch.ones_like(expected).flatten(0, 1).t() @ full.bfloat16().flatten(0, 1)
    return (
        y.dtype is torch.bfloat16 and torch.equal(y, expected),
        torch.equal(linear.weight.grad, grad.float()),
        x.grad.dtype is torch.float32,
        gathered,
        [saved.bytes for saved in ledger.saved if saved.dtype.is_floating_point and saved.argument == "0"],
    )


def test_autocast_gathers_and_keeps_sixteen_bits(pools):
    full = 2 * (2 * 4 * 2 * 6)
    for right in pools[2].run(under_autocast, "tensor+sequence"):
        assert right == (True, True, True, {full}, [full // 2])
    for right in pools[2].run(under_autocast, "tensor+sequence, plain"):
        assert right[:4] == (True, True, True, {full})


def test_autocast_gives_sixteen_bits_in_a_row_parallel_linear_too():
    with torch.autocast("cpu", torch.bfloat16):
        assert RowParallelLinear(6, 8, TensorParallel())(torch.ones(4, 2, 6)).dtype is torch.bfloat16


def test_load_dense_refuses_what_does_not_fit():
    tp = TensorParallel(size=2, rank=1)
    dense = GPT(SHAPE, seed=1).state_dict()
    part: Any = GPT(SHAPE, tp, layers=range(1, 2), seed=2)
    before = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
    with pytest.raises(ConfigError, match=r"^layers.0.attention.projection.bias: is not a parameter of this GPT$"):
        load_dense(part, dense, tp)
    dense = {name: tensor for name, tensor in dense.items() if name in before}
    missing = {name: tensor for name, tensor in dense.items() if name != "final_norm.bias"}
    with pytest.raises(ConfigError, match="^final_norm.bias: is missing from the unsharded state$"):
        load_dense(part, missing, tp)
    wrong = {**dense, "layers.1.mlp.up.bias": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"^layers.1.mlp.up.bias: must have shape \[96\] .*, got \[1\]$"):
        load_dense(part, wrong, tp)
    assert all(torch.equal(parameter, before[name]) for name, parameter in part.named_parameters())
    load_dense(part, dense, tp)
    assert torch.equal(part.layers["1"].mlp.up.bias, dense["layers.1.mlp.up.bias"].chunk(2)[1])
    assert torch.equal(part.words.weight, dense["words.weight"].chunk(2)[1])
