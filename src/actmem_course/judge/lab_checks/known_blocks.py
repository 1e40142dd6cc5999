"""The blocks of labs 2 and 3 as steps: the column- and row-parallel linear, attention, the MLP, the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from actmem_course.judge.lab_checks.blocks import (
    F_BAR_STEP,
    F_STEP,
    G_BAR_STEP,
    G_STEP,
    Weights,
    added_bias,
    product,
)
from actmem_course.judge.lab_checks.steps import Program, Running, StepOf, add_residual, keep_residual, on_each
from actmem_course.pieces import core_attention, gelu, layer_norm, merge_heads, split_heads


def column_program(weights: Sequence[Weights], entry: StepOf = F_STEP) -> Program:
    """f or g, the linear, this rank's bias."""
    bias = replace(added_bias("bias", weights), place="after the linear, once")
    return [entry, product("the linear", "weight", weights), bias]


def gathering_program(weights: Sequence[Weights]) -> Program:
    return column_program(weights, G_STEP)


def row_program(weights: Sequence[Weights]) -> Program:
    """The linear, f_bar, the bias."""
    return [product("the linear", "weight", weights), F_BAR_STEP, added_bias("bias", weights)]


def scaled_biases(*names: str) -> Callable[[Sequence[Weights]], dict[str, list[StepOf]]]:
    """A bias that a rank adds t times, or a t-th of, in place of the bias."""

    def variants(weights: Sequence[Weights]) -> dict[str, list[StepOf]]:
        t = len(weights)

        def times(name: str, factor: float, words: str) -> StepOf:
            return StepOf(f"{name} is {words}", on_each(lambda y, rank: y + factor * weights[rank][name]))

        return {
            name: [
                times(name, t, "added t times: add it once"),
                times(name, 1 / t, "divided by t: each rank adds the whole of it"),
            ]
            for name in names
        }

    return variants


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


def heads_of(heads: int, scale: float = 1.0, dropout: Callable[[Tensor], Tensor] = lambda weights: weights):
    """A step: the core attention of a rank's heads.  scale: of Q."""

    def do(state: Running) -> None:
        def attended(y: Tensor, rank: int) -> Tensor:
            q, k, v = split_heads(y, heads)
            return merge_heads(core_attention(q * scale, k, v, dropout), y.shape[1])

        on_each(attended)(state)

    return do


def attention_program(heads: int) -> Callable[[Sequence[Weights]], Program]:
    """Lab 2's: from f to f_bar and the bias.  heads: a, of all ranks."""
    return lambda weights: [
        F_STEP,
        product("the product with qkv_weight", "qkv_weight", weights),
        replace(added_bias("qkv_bias", weights), place="before the core attention"),
        StepOf("the core attention", heads_of(heads // len(weights))),
        product("the product with projection_weight", "projection_weight", weights),
        F_BAR_STEP,
        added_bias("projection_bias", weights),
    ]


def attention_variants(heads: int, head_size: int) -> Callable[[Sequence[Weights]], dict[str, list[StepOf]]]:
    """The core attention with scores that are scaled twice, or by another size."""

    def variants(weights: Sequence[Weights]) -> dict[str, list[StepOf]]:
        here, h = heads // len(weights), heads * head_size
        return {
            "the core attention": [
                StepOf("the scores are divided by the root of the head size twice: core_attention does it", heads_of(here, head_size**-0.5)),
                StepOf("the scores are divided by the head size, not by its root: core_attention does it", heads_of(here, head_size**-0.5)),
                StepOf("the scores are divided by the root of h, not of the head size: use core_attention", heads_of(here, (head_size / h) ** 0.5)),
            ],
            **scaled_biases("qkv_bias", "projection_bias")(weights),
        }  # fmt: skip

    return variants


def layer_program(heads: int, core: float, blocks: Sequence[float]) -> Callable[[Sequence[Weights]], Program]:
    """Lab 3's.  heads: a.  core, blocks: what stands for the dropouts, a factor for each call."""

    def make(weights: Sequence[Weights]) -> Program:
        t, calls = len(weights), [0]

        def norm(number: int) -> Callable[[Tensor, int], Tensor]:
            return lambda y, rank: layer_norm(
                y, weights[rank][f"norm{number}_weight"], weights[rank][f"norm{number}_bias"]
            )

        def first(state: Running) -> None:
            calls[0] = 0
            keep_residual(state)

        def dropout(state: Running) -> None:
            calls[0] += 1
            on_each(lambda y, rank: y * blocks[(calls[0] - 1) % len(blocks)])(state)

        def add(state: Running) -> None:
            add_residual(state)
            keep_residual(state)

        def leave_to(name: str) -> StepOf:
            return replace(G_BAR_STEP, name=f"{name}'s g_bar")

        def end(name: str, weight: str, bias: str) -> list[StepOf]:
            return [
                product(f"the product with {weight}", weight, weights),
                leave_to(name),
                added_bias(bias, weights, family="the bias after g_bar"),
                StepOf(f"dropouts.block after {name}", dropout, "dropouts.block", "after the bias, before x is added"),
                StepOf(
                    f"the addition of x to {name}'s result", add, "the addition of x", "at the end of the block, once"
                ),
            ]

        return [
            StepOf("the residual", first),
            StepOf("the first layer norm", on_each(norm(1)), "the layer norm", "before attention"),
            replace(G_STEP, name="attention's g"),
            product("the product with qkv_weight", "qkv_weight", weights, "qkv_bias"),
            StepOf("the core attention", heads_of(heads // t, dropout=lambda weights: weights * core)),
            *end("attention", "projection_weight", "projection_bias"),
            StepOf("the second layer norm", on_each(norm(2)), "the layer norm", "before the MLP"),
            replace(G_STEP, name="the MLP's g"),
            product("the product with up_weight", "up_weight", weights, "up_bias"),
            StepOf("the gelu", on_each(lambda y, rank: gelu(y)), place="between the two linears"),
            *end("the MLP", "down_weight", "down_bias"),
        ]

    return make


def layer_variants(core: float, blocks: Sequence[float]) -> Callable[[Sequence[Weights]], dict[str, list[StepOf]]]:
    """dropouts.core where dropouts.block belongs."""

    def variants(weights: Sequence[Weights]) -> dict[str, list[StepOf]]:
        def scaled(words: str) -> StepOf:
            return StepOf(words, on_each(lambda y, rank: y * core))

        def add_twice(state: Running) -> None:
            state.y = [2 * x + y for x, y in zip(state.x, state.y)]
            keep_residual(state)

        found = {}
        for name in ("attention", "the MLP"):
            words = f"dropouts.core is applied to {name}'s result: that is for the attention weights, dropouts.block for what is added to x"
            found[f"dropouts.block after {name}"] = [scaled(words)]
            found[f"the addition of x to {name}'s result"] = [StepOf(f"x is added twice to {name}'s result", add_twice)]
        return found

    return variants
