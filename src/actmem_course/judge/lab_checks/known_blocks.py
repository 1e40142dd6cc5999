"""The blocks of labs 2 and 3 as steps, and what may come out wrong of them: the linears, attention, the MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.lab_checks.blocks import (
    F_BAR_STEP,
    F_STEP,
    G_STEP,
    Weights,
    added_bias,
    product,
)
from actmem_course.judge.lab_checks.operators import ACTIVATIONS
from actmem_course.judge.lab_checks.steps import Do, Program, Running, StepOf, Variants, on_each
from actmem_course.pieces import core_attention, gelu, merge_heads, split_heads

CORE_STEP = "the core attention"
Dropout = Callable[[Tensor], Tensor]


def column_program(weights: Sequence[Weights], entry: StepOf = F_STEP) -> Program:
    """f or g, the linear, this rank's bias."""
    bias = replace(added_bias("bias", weights), place="after the linear, once")
    return [entry, product("the linear", "weight", weights), bias]


def gathering_program(weights: Sequence[Weights]) -> Program:
    return column_program(weights, G_STEP)


def row_program(weights: Sequence[Weights]) -> Program:
    """The linear, f_bar, the bias."""
    return [product("the linear", "weight", weights), F_BAR_STEP, added_bias("bias", weights)]


def repeated_biases(*names: str) -> Callable[[Sequence[Weights]], Variants]:
    """A bias that a rank adds t times."""
    return lambda weights: {
        f"{name} is added t times: add it once": {name: _times(name, len(weights), weights)} for name in names
    }


def divided_biases(*names: str) -> Callable[[Sequence[Weights]], Variants]:
    """A bias of which a rank adds a t-th."""
    return lambda weights: {
        f"{name} is divided by t: each rank adds the whole of it": {name: _times(name, 1 / len(weights), weights)}
        for name in names
    }


def scaled_biases(*names: str) -> Callable[[Sequence[Weights]], Variants]:
    """Both."""
    return lambda weights: {**repeated_biases(*names)(weights), **divided_biases(*names)(weights)}


def _times(name: str, factor: float, weights: Sequence[Weights]) -> Do:
    return on_each(lambda y, rank: y + factor * weights[rank][name])


def other_activations() -> Variants:
    """What is taken for the course's gelu."""
    return {words: {"the gelu": on_each(lambda y, rank, f=f: f(y))} for words, f in ACTIVATIONS.items()}  # type: ignore[misc]


def with_x(what: str, bias: str, weights: Sequence[Weights]) -> Variants:
    """x added to a block that ends with the bias of that name."""

    def do(state: Running) -> None:
        state.y = [y + weights[rank][bias] + x for rank, (y, x) in enumerate(zip(state.y, state.start))]

    return {f"x is added to the result: this is {what} alone; the layer adds x afterwards": {bias: do}}


def mlp_program(weights: Sequence[Weights]) -> Program:
    """Lab 2's: from f to f_bar and the bias."""
    return [
        F_STEP,
        product("the product with up_weight", "up_weight", weights),
        replace(added_bias("up_bias", weights), place="before the gelu"),
        StepOf("the gelu", on_each(lambda y, rank: gelu(y)), place="between the two linears"),
        product("the product with down_weight", "down_weight", weights),
        F_BAR_STEP,
        added_bias("down_bias", weights),
    ]


def mlp_variants(weights: Sequence[Weights]) -> Variants:
    """Lab 2's MLP with another gelu, with x, with other biases."""
    return {
        **other_activations(),
        **with_x("the MLP", "down_bias", weights),
        **repeated_biases("up_bias")(weights),
        **divided_biases("up_bias", "down_bias")(weights),
    }


def heads_of(
    heads: int, core: Callable[..., Tensor] = core_attention, dropout: Dropout = lambda weights: weights
) -> Do:
    """The attention of ``heads`` heads on each rank."""

    def attended(y: Tensor, rank: int) -> Tensor:
        return merge_heads(core(*split_heads(y, heads), dropout), y.shape[1])

    return on_each(attended)


def other_cores(heads: int, t: int, head_size: int, dropout: Dropout = lambda weights: weights) -> Variants:
    """Other core attentions.  dropout: a factor, which may come before or after the product with V."""
    order = "split_heads gives Q, K, V, and core_attention takes them in this order"
    cores: dict[str, Callable[..., Tensor]] = {
        "there is no causal mask, so a token attends to later ones: use core_attention":
            lambda q, k, v, dropout: dropout(F.scaled_dot_product_attention(q, k, v)),
        f"Q and K are swapped: {order}": lambda q, k, v, dropout: core_attention(k, q, v, dropout),
        f"K and V are swapped: {order}": lambda q, k, v, dropout: core_attention(q, v, k, dropout),
        "the scores are not divided by the root of the head size: use core_attention":
            lambda q, k, v, dropout: core_attention(q * head_size**0.5, k, v, dropout),
        "the scores are divided by the root of the head size twice: core_attention does it":
            lambda q, k, v, dropout: core_attention(q * head_size**-0.5, k, v, dropout),
        "the scores are divided by the root of h, not of the head size: use core_attention":
            lambda q, k, v, dropout: core_attention(q * heads**-0.5, k, v, dropout),
    }  # fmt: skip
    all_heads = "a rank's part is split into a heads; it holds a/t: divide num_attention_heads by the number of ranks"
    return {words: {CORE_STEP: heads_of(heads // t, core, dropout)} for words, core in cores.items()} | {
        all_heads: {CORE_STEP: heads_of(heads, core_attention, dropout)}
    }


def attention_program(heads: int) -> Callable[[Sequence[Weights]], Program]:
    """Lab 2's: from f to f_bar and the bias.  heads: a, of all ranks."""
    return lambda weights: [
        F_STEP,
        product("the product with qkv_weight", "qkv_weight", weights),
        replace(added_bias("qkv_bias", weights), place="before the core attention"),
        StepOf(CORE_STEP, heads_of(heads // len(weights))),
        product("the product with projection_weight", "projection_weight", weights),
        F_BAR_STEP,
        added_bias("projection_bias", weights),
    ]


def attention_variants(heads: int, head_size: int) -> Callable[[Sequence[Weights]], Variants]:
    """Lab 2's attention with other cores, with x, with other biases."""
    return lambda weights: {
        **other_cores(heads, len(weights), head_size),
        **with_x("attention", "projection_bias", weights),
        **repeated_biases("qkv_bias")(weights),
        **divided_biases("qkv_bias", "projection_bias")(weights),
    }
