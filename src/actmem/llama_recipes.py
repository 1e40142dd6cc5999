"""The tables of today's layers: RMSNorm, rotated Q and K, grouped-query attention, SwiGLU, no dropout, no biases.

A model that normalises the query and key of each head (Qwen3) keeps them before that norm as well;
a model with experts keeps who goes to which expert, and the experts' tensors in place of one MLP's.
Nothing in this file needs torch.
"""

from __future__ import annotations

from dataclasses import replace

from actmem.llama_shape import LlamaShape
from actmem.recipes import LayerTerms, Recipe

_QKV = ("QKV projection",)
_SCORES = ("QKᵀ", "attention over V")
_NORMS = ("norm 1 statistics", "norm 2 statistics")

_ROTATED = (
    Recipe("Q", ("QKV projection input",), _QKV),
    Recipe("K", ("QKV projection input",), _QKV),
    Recipe("V", ("QKV projection input",), _QKV),
)
_NORMALISED = (
    Recipe("Q before its norm", ("QKV projection input",), _QKV),
    Recipe("Q", ("Q before its norm",)),
    Recipe("K before its norm", ("QKV projection input",), _QKV),
    Recipe("K", ("K before its norm",)),
    Recipe("V", ("QKV projection input",), _QKV),
)
_GATED_MLP = (
    Recipe("gate and up input", ("norm 2 input",)),
    Recipe("gate", ("gate and up input",), ("gate and up",)),
    Recipe("up", ("gate and up input",), ("gate and up",)),
    Recipe("down input", ("gate", "up")),
)
_EXPERTS = (
    Recipe("router input", ("norm 2 input",)),
    Recipe("chosen experts", ("router input",), ("router",)),
    Recipe("routing weights", ("router input",), ("router",)),
    Recipe("dispatch order", ("chosen experts",)),
    Recipe("dispatched weights", ("routing weights", "dispatch order")),
    Recipe("gate", ("router input", "dispatch order"), ("gate and up",)),
    Recipe("up", ("router input", "dispatch order"), ("gate and up",)),
    Recipe("down input", ("gate", "up", "dispatched weights")),
)


#: Under context parallelism by all-to-all: the kernel has all tokens of some heads, the projection some tokens of all.
_EXCHANGED = (
    Recipe("attention output before all-to-all", ("Q", "K", "V"), _SCORES),
    Recipe("attention projection input", ("attention output before all-to-all",)),
)


def _layer(heads: tuple[Recipe, ...], mlp: tuple[Recipe, ...], statistics: tuple[str, ...]) -> LayerTerms:
    return LayerTerms(
        "norm 1 input",
        (
            Recipe("QKV projection input", ("norm 1 input",)),
            *heads,
            Recipe("log-sum-exp", ("Q", "K", "V"), _SCORES),
            Recipe("attention projection input", ("Q", "K", "V"), _SCORES),
            Recipe("norm 2 input", ("norm 1 input", "attention projection input"), ("attention projection",)),
            *mlp,
        ),
        core=frozenset({"log-sum-exp"}),
        core_elementwise=False,
        last_products={"layer": "down"},
        statistics=statistics,
    )


_HEAD_NORMS = (*_NORMS, "Q norm statistics", "K norm statistics")
#: Llama's.
LLAMA_LAYER = _layer(_ROTATED, _GATED_MLP, _NORMS)
#: Qwen3's.  *elementwise* drops Q and K, which are a norm and a rotation away from what the product made.
QK_NORM_LAYER = _layer(_NORMALISED, _GATED_MLP, _HEAD_NORMS)
#: Mixtral's, and Qwen3's with experts.
EXPERT_LAYER = _layer(_ROTATED, _EXPERTS, _NORMS)
QK_NORM_EXPERT_LAYER = _layer(_NORMALISED, _EXPERTS, _HEAD_NORMS)


def ulysses_layer_terms(shape: LlamaShape) -> LayerTerms:
    """The same layer's table if all-to-alls exchange its tokens for heads around attention."""
    terms = llama_layer_terms(shape)
    recipes = [_EXCHANGED if each.term == "attention projection input" else (each,) for each in terms.recipes]
    return replace(terms, recipes=tuple(each for group in recipes for each in group))


def llama_layer_terms(shape: LlamaShape) -> LayerTerms:
    """The table of the layer of this shape."""
    if shape.num_experts:
        return QK_NORM_EXPERT_LAYER if shape.qk_norm else EXPERT_LAYER
    return QK_NORM_LAYER if shape.qk_norm else LLAMA_LAYER
