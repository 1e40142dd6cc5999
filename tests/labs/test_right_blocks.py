"""What answers are compared with: our blocks on all ranks together give the uncut block's result and gradients."""

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from actmem_course.judge.cases.lab3_sequence_parallel import PARTIAL, Scaling
from actmem_course.judge.solutions import lab2_tensor_parallel as lab2
from actmem_course.judge.solutions import lab3_sequence_parallel as lab3
from actmem_course.judge.virtual import VirtualRanks
from actmem_course.pieces import (
    Dropouts,
    LayerWeights,
    core_attention,
    gelu,
    layer,
    merge_heads,
    random_weights,
    split_heads,
)

S, B, HEADS = 8, 2, 8
H = 4 * HEADS
MLP, ATTENTION = ("up_weight", "up_bias", "down_weight", "down_bias"), ("qkv_weight", "qkv_bias", "projection_weight", "projection_bias")  # fmt: skip


def whole_mlp(x, w):
    return F.linear(gelu(F.linear(x, w.up_weight, w.up_bias)), w.down_weight, w.down_bias)


def whole_attention(x, w):
    q, k, v = split_heads(F.linear(x, w.qkv_weight, w.qkv_bias), HEADS)
    return F.linear(merge_heads(core_attention(q, k, v), B), w.projection_weight, w.projection_bias)


def sharded_layer(x, w, group, linear):
    return lab3.layer(x, w, cast(Dropouts, Scaling()), linear, group)


#: The uncut function, ours, the weights that it has, and whether tokens are cut.
CASES: dict[str, Any] = {
    "mlp": (
        whole_mlp,
        lambda x, w, group: lab2.mlp(x, w.up_weight, w.up_bias, w.down_weight, w.down_bias, group),
        MLP,
        False,
    ),
    "attention": (
        whole_attention,
        lambda x, w, group: lab2.attention(
            x, w.qkv_weight, w.qkv_bias, w.projection_weight, w.projection_bias, HEADS, group
        ),
        ATTENTION,
        False,
    ),
    **{
        f"layer with {linear.__name__}": (
            lambda x, w: layer(x, w, cast(Dropouts, Scaling())),
            partial(sharded_layer, linear=linear),
            tuple(random_weights(H, HEADS).named()),
            True,
        )
        for linear in (lab3.gathering_linear, lab3.shard_keeping_linear)
    },
}


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_ranks_together_are_the_uncut_block(case, t):
    uncut, ours, names, cut = CASES[case]
    torch.manual_seed(3)
    w = random_weights(H, HEADS, seed=4).map(lambda name, x: (x + 0.1 * torch.randn_like(x)).requires_grad_())
    x, upstream = (torch.randn(S, B, H, dtype=torch.float64) for _ in range(2))
    whole = x.clone().requires_grad_()
    y = uncut(whole, w)
    y.backward(upstream)
    inputs, above = (tensor.chunk(t) if cut else [tensor] * t for tensor in (x, upstream))

    def run(rank):
        own = w.map(lambda name, x: x.detach()).part(rank.number, t).map(lambda name, x: x.clone().requires_grad_())
        leaf = inputs[rank.number].clone().requires_grad_()
        result = ours(leaf, own, dist.group.WORLD)
        result.backward(above[rank.number])
        return result.detach(), leaf.grad, {name: getattr(own, name).grad for name in names}

    results, gradients, of_weights = zip(*VirtualRanks(t).run(run))
    join = torch.cat if cut else lambda parts: parts[0]
    torch.testing.assert_close(join(results), y.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(join(gradients), whole.grad, rtol=0, atol=1e-9)
    everything = LayerWeights(
        HEADS, **{n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in w.named().items()}
    )
    for rank in range(t):
        for name in set(names) - (set(PARTIAL) if cut else set()):
            right = getattr(everything.part(rank, t), name)
            torch.testing.assert_close(of_weights[rank][name], right, rtol=0, atol=1e-9)
    for name in PARTIAL if cut else ():
        total = sum(own[name] for own in of_weights)
        torch.testing.assert_close(total, getattr(w, name).grad, rtol=0, atol=1e-9)
