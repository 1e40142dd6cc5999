"""The linears: sizes, what a frozen weight keeps, autocast, second derivatives; loading unsharded weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from actmem.config import ConfigError, ModelShape
from actmem.layers.attention import SelfAttention
from actmem.layers.gpt import GPT
from actmem.layers.transformer import MLP, TransformerLayer
from actmem.measure.comms import count_collectives
from actmem.measure.ledger import record
from actmem.parallel.collectives import all_gather, start_all_reduce
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear, load_dense, shard
from actmem.parallel.rng import DropoutStreams
from actmem.recipes import Recompute

SHAPE = ModelShape(8, 2, 24, 4, num_layers=2, vocab_size=20)
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor+sequence": {"sequence_parallel": True},
    "tensor+sequence, plain": {"sequence_parallel": True, "keep_gathered_input": True},
}


def test_sizes_that_do_not_divide_are_refused():
    four, three = TensorParallel(size=4), TensorParallel(size=3)
    with pytest.raises(ConfigError, match="out_features: 10 must be divisible by tensor_parallel_size = 4"):
        ColumnParallelLinear(8, 10, four)
    with pytest.raises(ConfigError, match="in_features: 10 must be divisible by tensor_parallel_size = 4"):
        RowParallelLinear(10, 8, four)
    with pytest.raises(ConfigError, match="out_features: 32 must be divisible by tensor_parallel_size = 3"):
        MLP(ModelShape(8, 2, 8, 4), three)
    with pytest.raises(ConfigError, match="num_attention_heads: 4 must be divisible by tensor_parallel_size = 3"):
        SelfAttention(SHAPE, three, 0.0, DropoutStreams(1, three), Recompute.of("none"))


def test_in_place_all_reduce_writes_into_its_input(pools):
    assert all(pools[2].run(reduced_in_place))


def reduced_in_place():
    x, kept = torch.ones(3, 2), torch.ones(3, 2)
    result = start_all_reduce(x, tensor_parallel(), in_place=True).wait()
    start_all_reduce(kept, tensor_parallel()).wait()
    return result.data_ptr() == x.data_ptr() and x[0, 0] == 2 and kept[0, 0] == 1


def second_derivatives(form, recompute):
    """Gradients of the squared norm of a layer's gradients, on this rank and in the unsharded layer."""
    torch.manual_seed(7)
    dense = TransformerLayer(SHAPE, p=0.0, dtype=torch.float64)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.3)
    full = torch.randn(8, 2, 24, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(dense(full).pow(2).sum(), full, create_graph=True)
    whole = torch.autograd.grad(first.pow(2).sum(), [full, dense.mlp.up.weight, dense.attention.qkv.weight])

    tp = tensor_parallel(**FORMS[form])
    layer = TransformerLayer(SHAPE, tp, recompute=recompute, p=0.0, dtype=torch.float64)
    load_dense(layer, dense.state_dict(), tp)
    x = full.detach()
    x = (x.chunk(tp.size)[tp.rank] if tp.sequence_parallel else x).clone().requires_grad_()
    (first,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    own = torch.autograd.grad(first.pow(2).sum(), [x, layer.mlp.up.weight, layer.attention.qkv.weight])
    found = [all_gather(own[0], tp) if tp.sequence_parallel else own[0], *own[1:]]
    expected = [whole[0], *(shard(grad, 0, tp) for grad in whole[1:])]
    return max(((a - b).abs() / b.abs().clamp_min(1)).max().item() for a, b in zip(found, expected))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_are_those_of_the_unsharded_layer(pools, form, recompute):
    assert max(pools[2].run(second_derivatives, form, recompute)) < 1e-10


def test_the_loss_refuses_second_derivatives():
    model = GPT(SHAPE)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="VocabParallelCrossEntropy has no second derivative"):
        torch.autograd.grad(model.loss(model(tokens), tokens), list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_second_derivatives_pass_through_dropout(recompute):
    """⟨v, H v⟩ by two backward passes against the difference of two gradients."""
    layer = TransformerLayer(SHAPE, recompute=recompute, p=0.3, seed=3, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, v = torch.randn(2, 8, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    states = [generator.get_state() for generator in (layer.streams.replicated, layer.streams.sharded)]

    def gradient(x, **options):
        layer.streams.replicated.set_state(states[0])
        layer.streams.sharded.set_state(states[1])
        x = x.clone().requires_grad_()
        return x, torch.autograd.grad(layer(x).pow(2).sum(), x, **options)[0]

    leaf, first = gradient(x, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), leaf)
    step = 1e-6
    difference = (gradient(x + step * v)[1] - gradient(x - step * v)[1]) / (2 * step)
    torch.testing.assert_close(second, difference, rtol=1e-5, atol=1e-3)


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
        assert size == 4 * (4 * 2 * 6 * gathered + 4 * dist_tokens(form) * 2 * 8 // 2)
    assert pools[2].run(kept_bytes, form, True) == [0, 0]


def dist_tokens(form):
    """Times 4: the tokens that the row-parallel linear sees, of which each rank gives 4."""
    return 2 if "sequence" in form else 1


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


def test_load_dense_refuses_what_does_not_fit():
    tp = TensorParallel(size=2, rank=1)
    dense = GPT(SHAPE, seed=1).state_dict()
    part: Any = GPT(SHAPE, tp, layers=range(1, 2), seed=2)
    before = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
    with pytest.raises(ConfigError, match=r"^layers.0.attention.projection.bias: is not a parameter of this GPT$"):
        load_dense(part, dense, tp)
    missing = {name: tensor for name, tensor in dense.items() if name != "final_norm.bias"}
    with pytest.raises(ConfigError, match="^final_norm.bias: is missing from the unsharded state$"):
        load_dense(part, missing, tp, strict=False)
    wrong = {**dense, "layers.1.mlp.up.bias": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"^layers.1.mlp.up.bias: must have shape \[96\] .*, got \[1\]$"):
        load_dense(part, wrong, tp, strict=False)
    assert all(torch.equal(parameter, before[name]) for name, parameter in part.named_parameters())
    load_dense(part, dense, tp, strict=False)
    assert torch.equal(part.layers["1"].mlp.up.bias, dense["layers.1.mlp.up.bias"].chunk(2)[1])
    assert torch.equal(part.words.weight, dense["words.weight"].chunk(2)[1])
