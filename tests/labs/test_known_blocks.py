"""The judge's right answers: a block's steps on all ranks together give the uncut block's result and gradients."""

from typing import cast

import pytest
import torch
import torch.nn.functional as F

from actmem_course.judge.lab_checks.blocks import Block
from actmem_course.judge.lab_checks.known_blocks import (
    MLP_PROGRAM,
    ROW_PROGRAM,
    KnownLayer,
    attention_program,
    column_program,
    other_cores,
    other_gelus,
    with_x,
)
from actmem_course.judge.lab_checks.lab3_sequence_parallel import BLOCK_FACTORS, CORE_FACTOR, PARTIAL, Scaling
from actmem_course.judge.lab_checks.operators import F_OPERATOR
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

S, B, HEADS, HEAD_SIZE = 8, 2, 8, 4
H = HEADS * HEAD_SIZE


def uncut(function, w, x, upstream):
    """Result, gradient of x, and every weight's gradient, without ranks."""
    x, w = x.clone().requires_grad_(), w.map(lambda name, tensor: tensor.clone().requires_grad_())
    y = function(x, w)
    y.backward(upstream)
    grads = {name: tensor.grad for name, tensor in w.named().items() if tensor.grad is not None}
    return y.detach(), x.grad, grads


def mlp(x, w):
    return F.linear(gelu(F.linear(x, w.up_weight, w.up_bias)), w.down_weight, w.down_bias)


def attention(x, w):
    q, k, v = split_heads(F.linear(x, w.qkv_weight, w.qkv_bias), HEADS)
    return F.linear(merge_heads(core_attention(q, k, v), B), w.projection_weight, w.projection_bias)


def whole_layer(x, w):
    return layer(x, w, cast(Dropouts, Scaling()))


def known(t):
    return KnownLayer(HEADS, HEAD_SIZE, t, CORE_FACTOR, BLOCK_FACTORS)


#: The uncut function; of t, the steps and the mistakes by hand; whether tokens are cut.
CASES = {
    "mlp": (mlp, lambda t: (MLP_PROGRAM, {**other_gelus(), **with_x("the MLP", "down_bias")}), False),
    "attention": (attention, lambda t: (attention_program(HEADS // t), other_cores(HEADS, t, HEAD_SIZE)), False),
    "layer": (whole_layer, lambda t: (known(t).program(), known(t).variants()), True),
}


def block_of(case, t):
    function, steps, cut = CASES[case]
    torch.manual_seed(3)
    w = random_weights(H, HEADS, seed=4).map(lambda name, tensor: tensor + 0.1 * torch.randn_like(tensor))
    x, upstream = torch.randn(2, S, B, H, dtype=torch.float64)
    expected = uncut(function, w, x, upstream)
    parts = [
        {name: tensor for name, tensor in w.part(rank, t).named().items() if name in expected[2]} for rank in range(t)
    ]
    inputs, above = (tensor.chunk(t) if cut else [tensor] * t for tensor in (x, upstream))
    return Block(inputs, parts, above, *steps(t)), expected, cut


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_ranks_steps_together_are_the_uncut_block(case, t):
    block, (y, x_grad, grads), cut = block_of(case, t)
    found = block.run()
    join = torch.cat if cut else lambda parts: parts[0]
    torch.testing.assert_close(join([result for result, _ in found]), y, rtol=0, atol=1e-10)
    torch.testing.assert_close(join([own["x"] for _, own in found]), x_grad, rtol=0, atol=1e-9)
    for rank, wanted in enumerate(LayerWeights(HEADS, **grads_of_all(grads)).part(rank, t) for rank in range(t)):
        for name, part in wanted.named().items():
            if name in grads and not (cut and name in PARTIAL):
                torch.testing.assert_close(found[rank][1][name], part, rtol=0, atol=1e-9)
    for name in PARTIAL if cut else ():
        torch.testing.assert_close(sum(own[name] for _, own in found), grads[name], rtol=0, atol=1e-9)


def grads_of_all(grads):
    """Every weight's gradient; zeros for those that the block doesn't have."""
    return {name: grads.get(name, torch.zeros_like(w)) for name, w in random_weights(H, HEADS).named().items()}


@pytest.mark.parametrize("case", CASES)
def test_every_variant_changes_a_step_that_is_there_and_the_result(case):
    block, *_ = block_of(case, 2)
    names = {step.name for step in block.program}
    variants = block.variants
    assert len(variants) > 2 and all(changes.keys() <= names for changes in variants.values())
    made = dict(block.mistakes(0))
    right = block.run()[0][0]
    for diagnosis in variants:
        assert made[diagnosis].shape == right.shape and not torch.allclose(made[diagnosis], right), diagnosis


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("rows", [False, True])
def test_the_ranks_steps_together_are_the_uncut_linear(rows, t):
    torch.manual_seed(5)
    x, w, bias = (torch.randn(*sizes, dtype=torch.float64).requires_grad_() for sizes in ((S, B, 8), (12, 8), (12,)))
    upstream = torch.randn(S, B, 12, dtype=torch.float64)
    y = F.linear(x, w, bias)
    y.backward(upstream)
    if rows:
        parts = [{"weight": own, "bias": bias} for own in w.chunk(t, 1)]
        block = Block(x.chunk(t, -1), parts, [upstream] * t, ROW_PROGRAM)
    else:
        parts = [{"weight": own, "bias": c} for own, c in zip(w.chunk(t), bias.chunk(t))]
        block = Block([x] * t, parts, upstream.chunk(t, -1), column_program(F_OPERATOR))
    results, gradients = zip(*block.run())
    of = {name: [own[name] for own in gradients] for name in ("x", "weight", "bias")}
    found = (
        (results[-1], torch.cat(of["x"], -1), torch.cat(of["weight"], 1), of["bias"][-1])
        if rows
        else (torch.cat(results, -1), of["x"][-1], torch.cat(of["weight"]), torch.cat(of["bias"]))
    )
    for one, wanted in zip(found, (y.detach(), x.grad, w.grad, bias.grad)):
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-10)
