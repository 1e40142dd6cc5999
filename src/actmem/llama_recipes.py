"""The tables of today's layers: RMSNorm, rotated Q and K, grouped-query attention, SwiGLU, no dropout, no biases.

A model that normalises the query and key of each head (Qwen3) keeps them before that norm as well;
a model with experts keeps who goes to which expert, and the experts' tensors in place of one MLP's;
latent attention (DeepSeek) keeps the latents, or Q, K and V made from them, or both.
Nothing in this file needs torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from actmem.llama_shape import LlamaShape
from actmem.recipes import LayerTerms, Recipe

_QKV = ("QKV projection",)
_SCORES = ("QKᵀ", "attention over V")

_ROTATED = (
    Recipe("Q", ("QKV projection input",), _QKV),
    Recipe("K", ("QKV projection input",), _QKV),
    Recipe("V", ("QKV projection input",), _QKV),
)
#: *elementwise* drops Q and K, which are a norm and a rotation away from what the product made.
_NORMALISED = (
    Recipe("Q before its norm", ("QKV projection input",), _QKV),
    Recipe("Q", ("Q before its norm",)),
    Recipe("K before its norm", ("QKV projection input",), _QKV),
    Recipe("K", ("K before its norm",)),
    Recipe("V", ("QKV projection input",), _QKV),
)
#: "KV latent" is one tensor, the latent and the key with positions that all heads share: what inference caches.
_LATENT = (
    Recipe("Q latent", ("QKV projection input",), ("Q down-projection",)),
    Recipe("Q up-projection input", ("Q latent",)),
    Recipe("Q", ("Q up-projection input",), ("Q up-projection",)),
    Recipe("KV latent", ("QKV projection input",), ("KV down-projection",)),
    Recipe("KV up-projection input", ("KV latent",)),
    Recipe("K", ("KV up-projection input", "KV latent"), ("KV up-projection",)),
    Recipe("V", ("KV up-projection input",), ("KV up-projection",)),
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
_SHARED_EXPERTS = (
    Recipe("shared gate", ("router input",), ("shared gate and up",)),
    Recipe("shared up", ("router input",), ("shared gate and up",)),
    Recipe("shared down input", ("shared gate", "shared up")),
)


#: Under context parallelism by all-to-all: the kernel has all tokens of some heads, the projection some tokens of all.
_EXCHANGED = (
    Recipe("attention output before all-to-all", ("Q", "K", "V"), _SCORES),
    Recipe("attention projection input", ("attention output before all-to-all",)),
)


def llama_layer_terms(shape: LlamaShape) -> LayerTerms:
    """The table of the layer of this shape."""
    return _layer(shape.latent is not None, shape.qk_norm, shape.num_experts is not None, shape.shared_ffn_size > 0)


def ulysses_layer_terms(shape: LlamaShape) -> LayerTerms:
    """The same layer's table if all-to-alls exchange its tokens for heads around attention."""
    terms = llama_layer_terms(shape)
    recipes = [_EXCHANGED if each.term == "attention projection input" else (each,) for each in terms.recipes]
    return replace(terms, recipes=tuple(each for group in recipes for each in group))


@cache
def _layer(latent: bool, qk_norm: bool, experts: bool, shared: bool) -> LayerTerms:
    heads = _LATENT if latent else _NORMALISED if qk_norm else _ROTATED
    mlp = (*_EXPERTS, *_SHARED_EXPERTS * shared) if experts else _GATED_MLP
    normed = (("Q", "K") if qk_norm else ()) + (("Q latent", "KV latent") if latent else ())
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
        last_products={"layer": ("down",) + ("shared down",) * shared},
        statistics=("norm 1 statistics", "norm 2 statistics", *(f"{name} norm statistics" for name in normed)),
    )
