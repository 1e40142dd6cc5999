"""Experts: what a real router sends where, bytes on the fullest rank, and the wrong sizes."""

from typing import Any

import pytest
import torch

from actmem.config import Parallel
from actmem.ledger.census import census
from actmem.ledger.measure_layer import layer_rows_of
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import compare, total
from actmem_more.context import layer_groups
from actmem_more.experts import ExpertMLP, expert_ranks
from actmem_more.llama import LlamaLayer, LlamaStage
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows, most_routed_tokens

SHAPE = LlamaShape(12, 3, 32, 8, 2, 40, num_experts=8, experts_per_token=3)


def learned(recompute, sequence_parallel, members=None):
    """What differs from the formula with the router's own choice, and the pairs that this rank's experts took."""
    group = torch.distributed.new_group(members) if members else None
    if members and torch.distributed.get_rank() not in members:
        return "", 0, 0
    tp = tensor_parallel(group, sequence_parallel=sequence_parallel)
    layer = LlamaLayer(SHAPE, tp, recompute=recompute, seed=4, dtype=torch.bfloat16)
    assert isinstance(layer.mlp, ExpertMLP)
    s = 12 // tp.size if sequence_parallel else 12
    generator = torch.Generator().manual_seed(6 + tp.rank * sequence_parallel)
    x = torch.randn(s, 3, 32, generator=generator).to(torch.bfloat16).requires_grad_()
    measured = layer_rows_of(layer, x)
    predicted = llama_rows(SHAPE, Parallel(tp.size, sequence_parallel), recompute, 2, layer.mlp.routed_tokens)
    comparison = compare(predicted, measured)
    assert census(layer, lambda: x) == total(measured)
    before = layer.mlp.routed_tokens
    layer(x).sum().backward()
    assert torch.isfinite(layer.mlp.gate.grad).all() and x.grad.abs().sum() > 0
    return "" if comparison.exact else comparison.describe(), before, total(measured)


@pytest.mark.by_day(5)
@pytest.mark.parametrize("recompute", ["none", "elementwise"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("size", "members"), [(2, None), (4, None), (4, [3, 1])])
def test_the_routers_own_choice(pools, size, members, sequence_parallel, recompute):
    found = pools[size].run(learned, recompute, sequence_parallel, members)
    assert [wrong for wrong, _, _ in found] == [""] * size
    routed = [pairs for _, pairs, _ in found]
    assert sum(routed) == 12 * 3 * 3 and len(set(routed)) > 1  # none dropped, and not even
    held = [kept for _, _, kept in found]
    assert held.index(max(held)) == routed.index(max(routed))


def beside(t):
    """Errors of a layer whose experts all ranks share, beside t: against one that has them all, by each rank's tokens;
    and what differs from the formula."""
    tp, _ = layer_groups(1, sequence_parallel=t > 1, replicas=4 // t)
    options: dict = {"seed": 4, "dtype": torch.float64}
    layer, whole = LlamaLayer(SHAPE, tp, experts=expert_ranks(4), **options), LlamaLayer(SHAPE, **options)
    x = torch.randn(12, 3, 32, generator=torch.Generator().manual_seed(torch.distributed.get_rank() // t)).double()
    full, own = x.clone().requires_grad_(), x.chunk(t)[tp.rank].clone().requires_grad_()
    y, expected = layer(own), whole(full)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert isinstance(layer.mlp, ExpertMLP) and isinstance(whole.mlp, ExpertMLP)
    summed = whole.mlp.gate.grad.clone()
    torch.distributed.all_reduce(summed)  # of the whole layer's, each sequence counts t times
    mine = summed.chunk(4)[torch.distributed.get_rank()] / t
    pairs = ((y, expected.chunk(t)[tp.rank]), (own.grad, full.grad.chunk(t)[tp.rank]), (layer.mlp.gate.grad, mine))
    parallel = Parallel(t, t > 1, expert_parallel_size=4)
    predicted = llama_rows(SHAPE, parallel, "none", 8, layer.mlp.routed_tokens)
    comparison = compare(predicted, layer_rows_of(layer, own.detach().requires_grad_()))
    return max((a - b).abs().max().item() for a, b in pairs), "" if comparison.exact else comparison.describe()


@pytest.mark.parametrize("t", [1, 2])
def test_experts_beside_tensor_parallelism(pools, t):
    for error, wrong in pools[4].run(beside, t):
        assert error < 1e-11 and wrong == ""


def test_the_ranks_shares_add_up():
    for t, sequence_parallel, ranks in [
        (1, False, 1),
        (2, True, 2),
        (4, False, 4),
        (4, True, 4),
        (1, False, 4),
        (2, True, 4),
    ]:
        parallel = Parallel(t, sequence_parallel, expert_parallel_size=ranks)
        for routing in ("even", "one-sided"):
            shares = [forced_routed_tokens(SHAPE, parallel, routing, rank) for rank in range(ranks)]
            assert sum(shares) == ranks // t * 12 * 3 * 3 and max(shares) <= most_routed_tokens(SHAPE, parallel)
        assert max(shares) == most_routed_tokens(SHAPE, parallel)  # one-sided is the worst


def test_a_stage_routes_by_its_scores_unless_told_otherwise():
    layers: Any = LlamaStage(SHAPE.with_sizes(vocab_size=16)).layers
    assert layers[0].mlp.routing == "learned"


@pytest.mark.parametrize("routing", ["even", "one-sided"])
def test_forced_routing_takes_as_many_tokens_of_each_expert_as_are_sent_there(routing):
    """The counts come from the sizes and the choice from a router's place: they must be the same tokens."""
    mlp = ExpertMLP(SHAPE, TensorParallel(None, 1, 0), seed=0, routing=routing)
    chosen, weights = mlp.route(torch.randn(12, 3, 32))
    assert weights.sum(-1).allclose(torch.ones(12, 3))
    counts = torch.bincount(chosen.flatten(), minlength=8).tolist()
    assert counts == (4 * [14] + 4 * [13] if routing == "even" else 3 * [36] + 5 * [0])
    mlp(torch.randn(12, 3, 32))
    assert mlp.routed_tokens == sum(counts) and all(len(set(row)) == 3 for row in chosen.flatten(0, 1).tolist())


def test_a_sigmoid_router_of_scores_that_underflow_gives_numbers():
    shape = SHAPE.with_sizes(sigmoid_router=True)
    mlp, x = ExpertMLP(shape, TensorParallel(), seed=0), torch.ones(12, 3, 32, requires_grad=True)
    with torch.no_grad():
        mlp.router.weight.fill_(-4.0)  # scores of -128
    y = mlp(x)
    y.sum().backward()
    assert y.eq(0).all() and all(one.grad.isfinite().all() for one in (x, *mlp.parameters()))
