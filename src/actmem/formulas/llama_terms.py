"""Activation bytes and FLOPs of today's layer: RMSNorm, rotary positions, grouped queries, SwiGLU, no dropout.

Attention runs through a flash kernel, so the scores are never stored: the terms with as²b are gone,
and with them the reason for selective recomputation.  ``e`` is the size of one activation element.
"""

from __future__ import annotations

from actmem.checks import ConfigError, checked
from actmem.config import Parallel
from actmem.formulas.expert_terms import expert_mlp_rows
from actmem.formulas.latent_terms import latent_head_rows, latent_products
from actmem.llama_shape import LlamaShape, check_llama_ranks, llama_layer_terms
from actmem.recipes import Recompute
from actmem.rows import Row

#: Bytes of a norm's statistic and of a log-sum-exp, which are float32 for every e up to 4.
FLOAT32 = 4


@checked
def llama_rows(
    shape: LlamaShape,
    parallel: Parallel = Parallel(),
    recompute: Recompute | str = "none",
    element_size: int = 2,
    routed_tokens: int | None = None,
) -> list[Row]:
    """The tensors that one layer keeps for backward on one rank, in the order of the forward pass.

    In 16 bits and without parallelism: 12sbh + 4sbkd + 6sbf + 4asb + 8sb if nothing is recomputed,
    8sbh + 4sbkd + 4sbf + 4asb + 8sb if all that needs no product is (elementwise).  Under sequence
    parallelism all of it is divided by t, as long as t <= k; with t > k every rank keeps one head's
    K and V.  A norm over each head's query and key keeps those before it and 4 bytes a head and token.
    Latent attention: see ``latent_head_rows``.  routed_tokens: of experts, see ``expert_mlp_rows``.
    Raises ConfigError if t ranks can't share the layer, or on a set that can't be rebuilt.
    """
    check_llama_ranks(shape, parallel)
    s, b, h, f = shape.seq_length, shape.micro_batch_size, shape.hidden_size, shape.ffn_hidden_size
    a, e, t = shape.num_attention_heads, element_size, parallel.tensor_parallel_size
    whole = parallel.sequence_parts
    wide = max(e, FLOAT32)
    rows = [
        Row("norm 1 input", e * s * b * h // whole, whole, "RMSNorm"),
        Row("norm 1 statistics", wide * s * b // whole, whole, "RMSNorm: 1/rms of each token"),
        Row("QKV projection input", e * s * b * h // whole, whole, "Q, K, V products"),
        *(latent_head_rows(shape, parallel, e) if shape.latent else _head_rows(shape, t, e)),
        Row("log-sum-exp", wide * a * s * b // t, t, "attention: one number a query"),
        Row("attention projection input", e * s * b * a * shape.value_size // t, t, "attention and projection"),
        Row("norm 2 input", e * s * b * h // whole, whole, "RMSNorm"),
        Row("norm 2 statistics", wide * s * b // whole, whole, "RMSNorm: 1/rms of each token"),
    ]
    if shape.num_experts:
        rows += expert_mlp_rows(shape, parallel, element_size, routed_tokens)
    elif routed_tokens is not None:
        raise ConfigError("routed_tokens", "this layer has no experts")
    else:
        rows += [
            Row("gate and up input", e * s * b * h // whole, whole, "gate and up products"),
            Row("gate", e * s * b * f // t, t, "SwiGLU"),
            Row("up", e * s * b * f // t, t, "SwiGLU"),
            Row("down input", e * s * b * f // t, t, "down product"),
        ]
    dropped = llama_layer_terms(shape).dropped(recompute)
    return [row for row in rows if row.term not in dropped]


def _head_rows(shape: LlamaShape, t: int, e: int) -> list[Row]:
    """Q, K and V, and what their norms keep if the model has them."""
    tokens, d, wide = shape.seq_length * shape.micro_batch_size, shape.d, max(e, FLOAT32)
    heads = {"Q": shape.num_attention_heads, "K": shape.num_key_value_heads}
    ranks = {name: min(t, count) for name, count in heads.items()}
    rows = []
    for name, count in heads.items():
        size = e * tokens * count * d // ranks[name]
        if shape.qk_norm:
            statistics = wide * tokens * count // ranks[name]
            rows += [
                Row(f"{name} before its norm", size, ranks[name], "RMSNorm over each head"),
                Row(f"{name} norm statistics", statistics, ranks[name], "RMSNorm: 1/rms of each head"),
            ]
        rows.append(Row(name, size, ranks[name], "attention, rotated"))
    return [*rows, Row("V", rows[-1].bytes, ranks["K"], "attention")]


@checked
def llama_products(shape: LlamaShape) -> dict[str, int]:
    """FLOPs of each product of one layer's forward pass over all ranks, named as in ``recipes``.

    Attention counts all s² scores, as 2205.05198 appendix A does.  The router's counts once, also where every
    rank runs it on every token.
    """
    tokens, h, a, d = shape.seq_length * shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads, shape.d
    pairs = 2 * tokens * shape.seq_length * a
    f, taken, shared = shape.ffn_hidden_size, shape.experts_per_token or 1, shape.shared_ffn_size
    heads = {"QKV projection": 2 * tokens * h * (a + 2 * shape.num_key_value_heads) * d}
    router = {"router": 2 * tokens * h * shape.num_experts} if shape.num_experts else {}
    of_shared = {"shared gate and up": 4 * tokens * h * shared, "shared down": 2 * tokens * h * shared}
    return {
        **(latent_products(shape) if shape.latent else heads),
        "QKᵀ": pairs * d,
        "attention over V": pairs * shape.value_size,
        "attention projection": 2 * tokens * a * shape.value_size * h,
        **router,
        "gate and up": 4 * tokens * taken * h * f,
        "down": 2 * tokens * taken * h * f,
        **(of_shared if shared else {}),
    }


@checked
def llama_recomputed_flops(shape: LlamaShape, recompute: Recompute | str) -> int:
    """FLOPs that backward adds to one layer by making dropped terms again, over all ranks."""
    products = llama_products(shape)
    return sum(products[name] for name in llama_layer_terms(shape).products_again(recompute))
