"""Lab 3's layer as steps, and what may come out wrong of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from actmem_course.judge.lab_checks.blocks import G_BAR_STEP, G_STEP, Weights, added_bias, product
from actmem_course.judge.lab_checks.known_blocks import (
    CORE_STEP,
    heads_of,
    other_activations,
    other_cores,
    repeated_biases,
)
from actmem_course.judge.lab_checks.steps import (
    Do,
    Program,
    Running,
    StepOf,
    Variants,
    add_residual,
    keep_residual,
    on_each,
    one_after_another,
)
from actmem_course.pieces import gelu, layer_norm

_BLOCKS = ("attention", "the MLP")
_NORMS = ("the first layer norm", "the second layer norm")


@dataclass(frozen=True)
class KnownLayer:
    """heads: a.  core, block: what stands for the dropouts; block has a factor for each call."""

    heads: int
    head_size: int
    core: float
    block: Sequence[float]

    def program(self, weights: Sequence[Weights]) -> Program:
        """From the first layer norm to the second addition."""

        def end(name: str, weight: str, bias: str) -> list[StepOf]:
            return [
                product(f"the product with {weight}", weight, weights),
                replace(G_BAR_STEP, name=f"{name}'s g_bar"),
                added_bias(bias, weights, family="the bias after g_bar"),
                StepOf(_drop(name), self.drop, "dropouts.block", "after the bias, before x is added"),
                StepOf(_addition(name), add_residual, "the addition of x", "at the end of the block, once"),
            ]

        return [
            StepOf(_NORMS[0], norm(weights, 1), "the layer norm", "before attention"),
            replace(G_STEP, name="attention's g"),
            product("the product with qkv_weight", "qkv_weight", weights, "qkv_bias"),
            StepOf(CORE_STEP, self.attention(len(weights), self.core)),
            *end("attention", "projection_weight", "projection_bias"),
            StepOf(_NORMS[1], norm(weights, 2), "the layer norm", "before the MLP"),
            replace(G_STEP, name="the MLP's g"),
            product("the product with up_weight", "up_weight", weights, "up_bias"),
            StepOf("the gelu", on_each(lambda y, rank: gelu(y)), place="between the two linears"),
            *end("the MLP", "down_weight", "down_bias"),
        ]

    def attention(self, t: int, core: float) -> Do:
        """The core attention with another factor for its dropout."""
        return heads_of(self.heads // t, dropout=lambda weights: weights * core)

    def drop(self, state: Running) -> None:
        """dropouts.block."""
        factor = self.block[state.dropped % len(self.block)]
        state.dropped += 1
        state.y = [y * factor for y in state.y]

    def variants(self, weights: Sequence[Weights]) -> Variants:
        """Mistakes of more than one step, or with another step."""
        t = len(weights)
        no_dropout: dict[str, Do | None] = {CORE_STEP: self.attention(t, 1.0)}
        as_core = on_each(lambda y, rank: y * self.core)
        both_as_core = {_drop(name): as_core for name in _BLOCKS}
        biases = repeated_biases("projection_bias", "down_bias")(weights)
        of_core = "that is for the attention weights, dropouts.block for what is added to x"
        return {
            **other_activations(),
            **other_cores(self.heads, t, self.head_size, lambda weights: weights * self.core),
            "the biases after g_bar are added on every rank before it, so the result holds them t times": {
                name: do for changes in biases.values() for name, do in changes.items()
            },
            "dropouts.core is not used: it is core_attention's fourth argument": no_dropout,
            "neither of the dropouts is used": no_dropout | dict.fromkeys(map(_drop, _BLOCKS)),
            "dropouts.core and dropouts.block are swapped: core is for the attention weights": {
                CORE_STEP: self.attention(t, self.block[0]),
                **both_as_core,
            },
            **{f"dropouts.core is applied to {name}'s result: {of_core}": {_drop(name): as_core} for name in _BLOCKS},
            **_in_one_or_both(
                "dropouts.block is applied to the sum with x{}: apply it to what is added, then add x",
                lambda name: {
                    _drop(name): None,
                    _addition(name): one_after_another(add_residual, self.drop, keep_residual),
                },
            ),
            **_of_additions(),
            **_of_norms(weights),
        }


def _drop(name: str) -> str:
    return f"dropouts.block after {name}"


def _addition(name: str) -> str:
    return f"the addition of x to {name}'s result"


def norm(weights: Sequence[Weights], number: int) -> Do:
    """The layer norm with the weights of that number."""

    def do(state: Running) -> None:
        state.y = state.normed = [
            layer_norm(y, own[f"norm{number}_weight"], own[f"norm{number}_bias"]) for y, own in zip(state.y, weights)
        ]

    return do


def _in_one_or_both(words: str, changes: Callable[[str], Mapping[str, Do | None]]) -> Variants:
    """The same mistake in attention, in the MLP, in both."""
    one = {words.format(f" in {name}"): changes(name) for name in _BLOCKS}
    return one | {words.format(""): {step: do for name in _BLOCKS for step, do in changes(name).items()}}


def _of_additions() -> Variants:
    """What leaves a block, and what x is added to."""

    def part_only(state: Running) -> None:
        state.y = [y.chunk(state.t)[rank] for rank, y in enumerate(state.y)]

    def to_normed(state: Running) -> None:
        state.x = state.normed
        add_residual(state)

    def twice(state: Running) -> None:
        state.y = [2 * x + y for x, y in zip(state.x, state.y)]
        keep_residual(state)

    leave = "this rank's part only: the ranks' products must leave through g_bar"
    return {
        **{f"{name}'s result is {leave}": {f"{name}'s g_bar": part_only} for name in _BLOCKS},
        f"the results of attention and the MLP are {leave}": {f"{name}'s g_bar": part_only for name in _BLOCKS},
        **{f"x is not added to {name}'s result": {_addition(name): keep_residual} for name in _BLOCKS},
        "x is added neither to attention's result nor to the MLP's": {
            _addition(name): keep_residual for name in _BLOCKS
        },
        **{f"x is added twice to {name}'s result": {_addition(name): twice} for name in _BLOCKS},
        **_in_one_or_both(
            "the sum is with the layer norm's result{}: add to x from before the norm",
            lambda name: {_addition(name): to_normed},
        ),
    }


def _of_norms(weights: Sequence[Weights]) -> Variants:
    first, second = norm(weights, 1), norm(weights, 2)

    def of_start(state: Running) -> None:
        state.y = state.start
        second(state)

    after = [one_after_another(add_residual, do, keep_residual) for do in (first, second)]
    return {
        "the second layer norm is applied to the layer's input; apply it to x after attention's result is added": {
            _NORMS[1]: of_start
        },
        "the weights of the two layer norms are swapped: norm1 comes before attention, norm2 before the MLP": {
            _NORMS[0]: second,
            _NORMS[1]: first,
        },
        "norm1 is used before the MLP too; the layer norm there has norm2's weights": {_NORMS[1]: first},
        "the layer norms come after the additions; apply them to the inputs of attention and the MLP, not to the residual x": {
            **dict.fromkeys(_NORMS),
            **{_addition(name): do for name, do in zip(_BLOCKS, after)},
        },
    }
