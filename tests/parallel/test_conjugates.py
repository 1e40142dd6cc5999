"""f, f_bar, g, g_bar: what they compute, that they are adjoint, that they save nothing."""

import pytest
import torch
import torch.distributed as dist

from actmem.ledger.comms import count_collectives
from actmem.ledger.recorder import record
from actmem.parallel.collectives import all_gather, all_reduce, reduce_scatter
from actmem.parallel.conjugates import f, f_bar, f_bar_or_g_bar, g, g_bar
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_course.figures.operators import CONJUGATE_OF, FORWARD_COLLECTIVE


def random(*shape):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inner(a, b):
    """⟨a, b⟩ over all ranks."""
    return all_reduce((a * b).sum().reshape(1), tensor_parallel()).item()


def pair(operator, x, u):
    """⟨operator(x), u⟩ and ⟨x, operator's backward of u⟩, each summed over the ranks."""
    x = x.clone().requires_grad_()
    y = operator(x, tensor_parallel())
    y.backward(u)
    return inner(y.detach(), u), inner(x.detach(), x.grad)


def check_adjoint():
    t = dist.get_world_size()
    shard, whole = random(6, 2, 5), random(6 * t, 2, 5)
    replicated = all_reduce(whole, tensor_parallel())
    found = {
        # g: shard → whole.  g_bar: whole → shard.  Backward must be the exact adjoint.
        "g": pair(g, shard, whole),
        "g_bar": pair(g_bar, whole, shard),
    }
    tp = tensor_parallel()
    # The paper's identity itself: ⟨g(x), u⟩ = ⟨x, ḡ(u)⟩, without autograd.
    found["forwards"] = (inner(all_gather(shard, tp), whole), inner(shard, reduce_scatter(whole, tp)))
    # f and f_bar treat a replicated tensor as one tensor: it counts once and not t times.
    x = replicated.clone().requires_grad_()
    f(x, tp).backward(whole)
    found["f"] = (inner(replicated, whole), (replicated * x.grad).sum().item())
    x = whole.clone().requires_grad_()
    y = f_bar(x, tp)
    y.backward(replicated)
    found["f_bar"] = ((y.detach() * replicated).sum().item(), inner(whole, x.grad))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_conjugates_are_adjoint(pools, size):
    for found in pools[size].run(check_adjoint):
        for name, (left, right) in found.items():
            assert left == pytest.approx(right, rel=1e-12), name


def check_meaning():
    tp, t, rank = tensor_parallel(), dist.get_world_size(), dist.get_rank()
    mine = torch.full((2, 3), float(rank + 1))
    parts = torch.arange(2.0 * t).repeat_interleave(3).view(2 * t, 3)
    before = mine.clone(), parts.clone()
    total = t * (t + 1) / 2
    assert torch.equal(f(mine, tp), mine)
    assert torch.equal(f_bar(mine, tp), torch.full((2, 3), total))
    assert torch.equal(g(mine, tp), torch.arange(1.0, t + 1).repeat_interleave(2)[:, None].expand(-1, 3))
    assert torch.equal(g_bar(parts, tp), t * parts[2 * rank : 2 * rank + 2])
    replicated = mine.clone().requires_grad_()
    f(replicated, tp).backward(mine)
    assert torch.equal(mine, before[0]) and torch.equal(parts, before[1])  # out of place
    assert torch.equal(f_bar_or_g_bar(mine, tp), torch.full((2, 3), total)) and mine[0, 0] == total  # in place


@pytest.mark.parametrize("size", [2, 4])
def test_what_each_computes(pools, size):
    pools[size].run(check_meaning)


def collectives_and_bytes_saved():
    """The kinds of collective that each operator's forward and backward start; what it saves."""
    found, saved = {}, []
    for name, operator in (("f", f), ("f̄", f_bar), ("g", g), ("ḡ", g_bar)):
        x = torch.ones(4, 2, requires_grad=True)
        with count_collectives() as forward, record(torch.nn.Identity()) as ledger:
            y = operator(x, tensor_parallel())
        saved += ledger.saved  # y is alive, as the caller's
        with count_collectives() as backward:
            y.sum().backward()
        found[name] = [[one.kind for one in seen.collectives] for seen in (forward, backward)]
    return found, saved


def test_they_save_nothing_and_the_drawn_operators_have_their_collectives(pools):
    drawn = {
        operator: [[kind] if (kind := FORWARD_COLLECTIVE[one]) else [] for one in (operator, CONJUGATE_OF[operator])]
        for operator in FORWARD_COLLECTIVE
    }
    assert pools[2].run(collectives_and_bytes_saved) == [(drawn, [])] * 2


def test_one_rank_sends_nothing():
    x = torch.ones(4, 2, requires_grad=True)
    for operator in (f, f_bar, g, g_bar):
        assert torch.equal(operator(x, TensorParallel()), x)
