"""The blocks of labs 2 and 3 as steps, and mistakes that no change of the steps' order makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.lab_checks import operators
from actmem_course.judge.lab_checks.mutations import Variants
from actmem_course.judge.lab_checks.steps import (
    Do,
    Program,
    Running,
    StepOf,
    add_residual,
    added_bias,
    enter_block,
    exchanging,
    on_each,
    step_product,
)
from actmem_course.pieces import core_attention, gelu, layer_norm, merge_heads, split_heads

_AFTER_SUM = "after the sum over the ranks, once (the sum would hold it t times)"
_CORE, _GELU, _ATTENTION, _MLP = "the core attention", "the gelu", "attention", "the MLP"
_NORMS = ("the first layer norm", "the second layer norm")
_QKV_ORDER = "split_heads gives Q, K, V, and core_attention takes them in this order"


def column_program(entry: operators.Operator) -> Program:
    """f or g, the linear, this rank's bias."""
    return [exchanging(entry), step_product("weight", "the linear"), added_bias("bias", "after the linear, once")]


ROW_PROGRAM: Program = [
    step_product("weight", "the linear"), exchanging(operators.F_BAR_OPERATOR), added_bias("bias", _AFTER_SUM),
]  # fmt: skip
_GELU_STEP = StepOf(_GELU, on_each(lambda y, w: gelu(y)), place="between the two linears")
MLP_PROGRAM: Program = [
    exchanging(operators.F_OPERATOR),
    step_product("up_weight"),
    added_bias("up_bias", "before the gelu"),
    _GELU_STEP,
    step_product("down_weight"),
    exchanging(operators.F_BAR_OPERATOR),
    added_bias("down_bias", _AFTER_SUM),
]


def attention_program(heads: int) -> Program:
    """Lab 2's.  heads: those of one rank."""
    return [
        exchanging(operators.F_OPERATOR),
        step_product("qkv_weight"),
        added_bias("qkv_bias", "before the core attention"),
        StepOf(_CORE, _attended(heads)),
        step_product("projection_weight"),
        exchanging(operators.F_BAR_OPERATOR),
        added_bias("projection_bias", _AFTER_SUM),
    ]


def _attended(heads: int, core: Callable[..., Tensor] = core_attention, dropout: float = 1) -> Do:
    """The attention of ``heads`` heads on each rank.  dropout: the factor that stands for it."""
    return on_each(lambda y, w: merge_heads(core(*split_heads(y, heads), lambda x: x * dropout), y.shape[1]))


def other_gelus() -> Variants:
    """What is taken for the course's gelu."""
    tanh = 'F.gelu is called without approximate="tanh": use gelu of actmem_course.pieces, which has the tanh formula'
    return {
        tanh: {_GELU: on_each(lambda y, w: F.gelu(y))},
        "relu is used instead of gelu": {_GELU: on_each(lambda y, w: F.relu(y))},
    }


def other_cores(heads: int, t: int, head_size: int, dropout: float = 1) -> Variants:
    """Other core attentions.  heads: of all ranks."""

    def scaled(ratio: float) -> Callable[..., Tensor]:
        return lambda q, k, v, drop: core_attention(ratio * q, k, v, drop)

    root = "the scores are{} by the root of the head size{}: {}core_attention{}"
    cores: dict[str, Callable[..., Tensor]] = {
        "there is no causal mask, so a token attends to later ones: use core_attention":
            lambda q, k, v, drop: drop(F.scaled_dot_product_attention(q, k, v)),
        f"Q and K are swapped: {_QKV_ORDER}": lambda q, k, v, drop: core_attention(k, q, v, drop),
        f"K and V are swapped: {_QKV_ORDER}": lambda q, k, v, drop: core_attention(q, v, k, drop),
        f"Q and V are swapped: {_QKV_ORDER}": lambda q, k, v, drop: core_attention(v, k, q, drop),
        f"Q, K and V come in the order K, V, Q: {_QKV_ORDER}": lambda q, k, v, drop: core_attention(k, v, q, drop),
        f"Q, K and V come in the order V, Q, K: {_QKV_ORDER}": lambda q, k, v, drop: core_attention(v, q, k, drop),
        root.format(" not divided", "", "use ", ""): scaled(head_size**0.5),
        root.format(" divided", " twice", "", " does it"): scaled(head_size**-0.5),
        "the scores are divided by the root of h, not of the head size: use core_attention": scaled(heads**-0.5),
    }  # fmt: skip
    all_heads = "a rank's part is split into a heads; it holds a/t: divide num_attention_heads by the number of ranks"
    return {words: {_CORE: _attended(heads // t, core, dropout)} for words, core in cores.items()} | {
        all_heads: {_CORE: _attended(heads, dropout=dropout)}
    }


def with_x(what: str, bias: str) -> Variants:
    """x added to a block that ends with the bias of that name."""

    def do(state: Running) -> None:
        state.y = [x + y + own[bias] for x, y, own in zip(state.start, state.y, state.w)]

    return {f"x is added to the result: this is {what} alone; the layer adds x afterwards": {bias: do}}


@dataclass(frozen=True)
class KnownLayer:
    """Lab 3's.  heads: of all ranks.  core, block: factors for the dropouts; block has one for each call."""

    heads: int
    head_size: int
    t: int
    core: float
    block: Sequence[float]

    def program(self) -> Program:
        """From the first layer norm to the second addition."""
        core = StepOf(_CORE, self._core(self.core))
        return [
            *self._block(_ATTENTION, "norm1", "qkv", core, "projection"),
            *self._block(_MLP, "norm2", "up", _GELU_STEP, "down"),
        ]

    def _core(self, factor: float) -> Do:
        return _attended(self.heads // self.t, dropout=factor)

    def _block(self, what: str, norm: str, enter: str, middle: StepOf, leave: str) -> Program:
        branch = f"the residual branch around {what}"
        inside = "inside the residual branch, before g: what is added at the end is x from before the norm"
        return [
            StepOf(branch, enter_block, "the residual branch", "before the layer norm, with the x that comes into this block"),
            StepOf(_NORMS[what == _MLP], _norm(norm), "the layer norm", inside),
            exchanging(operators.G_OPERATOR, f"{what}'s"),
            step_product(f"{enter}_weight"),
            added_bias(f"{enter}_bias", "right after the product"),
            middle,
            step_product(f"{leave}_weight"),
            exchanging(operators.G_BAR_OPERATOR, f"{what}'s"),
            added_bias(f"{leave}_bias", _AFTER_SUM, "the row-parallel linear's bias"),
            StepOf(_drop(what), self._dropped, "dropouts.block", "after the bias, before x is added"),
            StepOf(f"the addition of x to {what}'s result", add_residual, "the addition of x", "at the block's end, once"),
        ]  # fmt: skip

    def _next_factor(self, state: Running) -> float:
        state.dropped += 1
        return self.block[(state.dropped - 1) % len(self.block)]

    def _dropped(self, state: Running) -> None:
        factor = self._next_factor(state)
        state.y = [factor * y for y in state.y]

    def _dropped_residual(self, state: Running) -> None:
        factor = self._next_factor(state)
        state.x = [factor * x for x in state.x]

    def variants(self) -> Variants:
        """With the dropouts exchanged, or a layer norm of another x."""
        as_core, of_start = on_each(lambda y, w: self.core * y), _norm("norm2")
        block = {what: _drop(what) for what in (_ATTENTION, _MLP)}
        no_core: dict[str, Do | None] = {_CORE: self._core(1)}

        def norm_of_start(state: Running) -> None:
            state.y = state.start
            of_start(state)

        def block_as_core(state: Running) -> None:
            self._core(self._next_factor(state))(state)

        return {
            **other_gelus(),
            **other_cores(self.heads, self.t, self.head_size, self.core),
            "dropouts.core is not used: it is core_attention's fourth argument": no_core,
            "dropouts.block is used for the attention weights: that is for what is added to x, dropouts.core for them":
                {_CORE: block_as_core},
            **{f"dropouts.block is applied to the residual x and not to {what}'s result": {drop: self._dropped_residual}
                for what, drop in block.items()},
            "neither of the dropouts is used": no_core | dict.fromkeys(block.values()),
            "dropouts.core and dropouts.block are swapped: core is for the attention weights":
                {_CORE: self._core(self.block[0]), **dict.fromkeys(block.values(), as_core)},
            **{f"dropouts.core is applied to {what}'s result: that is for the attention weights, dropouts.block for what is added to x":
                {drop: as_core} for what, drop in block.items()},
            "the second layer norm is applied to the layer's input; apply it to x after attention's result is added":
                {_NORMS[1]: norm_of_start},
        }  # fmt: skip


def _drop(what: str) -> str:
    return f"{what}'s dropouts.block"


def _norm(name: str) -> Do:
    return on_each(lambda y, w: layer_norm(y, w[f"{name}_weight"], w[f"{name}_bias"]))
