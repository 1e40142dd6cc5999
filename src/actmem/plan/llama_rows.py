"""What one layer of today's decoder keeps: each tensor once, in 16 bits, statistics and log-sum-exp in float32.

Flash attention, no dropout, no biases.  Sequence parallelism cuts norms and residual stream; each
rank keeps its shard and gathers again in backward, as the paper's layer does.  Context parallelism
cuts everything along the sequence: K and V are gathered, and gathered again in backward.
"""

from __future__ import annotations

from actmem.checks import ConfigError, check_divides, checked
from actmem.plan.decoder import Decoder
from actmem.plan.layout import Layout
from actmem.recipes import LLAMA_LAYER
from actmem.rows import Row

LLAMA_MODES = ("none", "elementwise", "full")


@checked
def check_llama_layer(decoder: Decoder, layout: Layout, seq_length: int) -> None:
    """Raise ConfigError if t and context-parallel ranks can't share one layer.

    t may exceed the key/value heads if it is a multiple of them: then ranks hold copies.
    """
    t, k = layout.tensor_parallel_size, decoder.num_key_value_heads
    check_divides("num_attention_heads", decoder.num_attention_heads, "tensor_parallel_size", t)
    check_divides("ffn_hidden_size", decoder.ffn_hidden_size, "tensor_parallel_size", t)
    if k % t and t % k:
        raise ConfigError("num_key_value_heads", f"{k} must be divisible by tensor_parallel_size = {t}, or divide it")
    own = check_divides("seq_length", seq_length, "context_parallel_size", layout.context_parallel_size)
    if layout.sequence_parallel:
        check_divides("seq_length / context_parallel_size", own, "tensor_parallel_size", t)


def own_tokens(layout: Layout, seq_length: int) -> int:
    """Tokens of one microbatch on a context-parallel rank."""
    return seq_length // layout.context_parallel_size * layout.micro_batch_size


def own_key_value_size(decoder: Decoder, layout: Layout) -> int:
    """Elements of one rank's keys for one token: kd/t, but at least one head."""
    return max(decoder.num_key_value_heads // layout.tensor_parallel_size, 1) * decoder.head_size


@checked
def llama_layer_rows(decoder: Decoder, layout: Layout, seq_length: int, recompute: str = "none") -> list[Row]:
    """The tensors that one layer keeps of one microbatch on one rank.

    Under TP + SP, none: (12sbh + 4sbkd + 6sbf + 4asb + 8sb)/t; elementwise: (8sbh + 4sbkd + 4sbf + 4asb + 8sb)/t;
    full: 2sbh/t.  Raises ConfigError on another mode, or if ranks can't share the layer.
    """
    check_llama_layer(decoder, layout, seq_length)
    if recompute not in LLAMA_MODES:
        raise ConfigError("recompute", f"must be one of {', '.join(LLAMA_MODES)}, got {recompute!r}")
    t, tokens = layout.tensor_parallel_size, own_tokens(layout, seq_length)
    whole = t if layout.sequence_parallel else 1
    hidden, query = 2 * tokens * decoder.hidden_size, 2 * tokens * decoder.query_size
    key, wide = 2 * tokens * own_key_value_size(decoder, layout), 2 * tokens * decoder.ffn_hidden_size
    heads = decoder.num_attention_heads
    dropped = LLAMA_LAYER.dropped(recompute)
    rows = [
        Row("norm 1 input", hidden // whole, whole, "residual stream"),
        Row("norm 1 statistic", 4 * tokens // whole, whole, "1/rms of each token"),
        Row("QKV projection input", hidden // whole, whole, "weight gradient"),
        Row("Q", query // t, t, "flash attention, rotated"),
        Row("K", key, t, "flash attention, rotated"),
        Row("V", key, t, "flash attention"),
        Row("attention projection input", query // t, t, "flash attention's output"),
        Row("log-sum-exp", 4 * heads * tokens // t, t, "flash attention"),
        Row("norm 2 input", hidden // whole, whole, "residual stream"),
        Row("norm 2 statistic", 4 * tokens // whole, whole, "1/rms of each token"),
        Row("gate and up input", hidden // whole, whole, "weight gradient"),
        Row("gate", wide // t, t, "SwiGLU"),
        Row("up", wide // t, t, "SwiGLU"),
        Row("down input", wide // t, t, "weight gradient"),
    ]
    if recompute == "full":
        return rows[:1]  # nor the statistics, which the terms' sets keep
    if decoder.qk_norm:
        own = key // (2 * tokens * decoder.head_size)
        rows[3:3] = [
            Row("Q before its norm", query // t, t, "RMSNorm over each head"),
            Row("K before its norm", key, t, "RMSNorm over each head"),
            Row("Q and K norm statistics", 4 * tokens * (heads // t + own), t, "1/rms of each head"),
        ]
    return [row for row in rows if row.term not in dropped]
