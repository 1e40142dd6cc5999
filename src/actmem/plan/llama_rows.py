"""Today's layer under every axis of a layout: ``formulas.llama_terms`` with the sequence cut by context parallelism.

Context parallelism cuts everything along the sequence: K and V are gathered for attention, and again
in backward.
"""

from __future__ import annotations

from actmem.checks import ConfigError
from actmem.formulas.llama_terms import forced_routed_tokens, llama_rows
from actmem.llama_shape import LlamaShape, own_context_shape
from actmem.plan.decoder import Decoder
from actmem.plan.layout import Layout
from actmem.rows import Row

LLAMA_MODES = ("none", "elementwise", "full")


def own_llama_shape(decoder: Decoder, layout: Layout, seq_length: int) -> LlamaShape:
    """One layer as a context-parallel rank sees it: its part of the sequence.

    Raises ConfigError if the ranks can't share the layer, or the sequence in two chunks each (``layers.context``).
    """
    d = decoder
    heads = d.num_attention_heads, d.num_key_value_heads
    shape = LlamaShape(
        seq_length, layout.micro_batch_size, d.hidden_size, *heads, d.ffn_hidden_size, d.head_size, d.qk_norm
    )
    if d.num_experts:
        shape = shape.with_sizes(num_experts=d.num_experts, experts_per_token=d.experts_per_token)
    return own_context_shape(shape, layout.within_layer, layout.context_parallel_size)


def check_llama_layer(decoder: Decoder, layout: Layout, seq_length: int) -> None:
    """Raise ConfigError if t and context-parallel ranks can't share one layer."""
    own_llama_shape(decoder, layout, seq_length)


def own_tokens(layout: Layout, seq_length: int) -> int:
    """Tokens of one microbatch on a context-parallel rank."""
    return seq_length // layout.context_parallel_size * layout.micro_batch_size


def own_key_value_size(decoder: Decoder, layout: Layout) -> int:
    """Elements of one rank's keys for one token: kd/t, but at least one head."""
    return max(decoder.num_key_value_heads // layout.tensor_parallel_size, 1) * decoder.head_size


def own_routed_tokens(decoder: Decoder, layout: Layout, seq_length: int, routing: str) -> int | None:
    """Pairs of a token and an expert on the rank that takes most of them (R); None without experts.

    routing: as of ``forced_routed_tokens``; of both the first rank takes most.
    """
    if decoder.num_experts is None:
        return None
    return forced_routed_tokens(own_llama_shape(decoder, layout, seq_length), layout.within_layer, routing, 0)


def llama_layer_rows(
    decoder: Decoder, layout: Layout, seq_length: int, recompute: str = "none", routing: str = "even"
) -> list[Row]:
    """The tensors that one layer keeps of one microbatch on one rank: those of ``llama_rows``.

    routing: see ``own_routed_tokens``.
    Raises ConfigError on another mode than LLAMA_MODES, or if ranks can't share the layer.
    """
    if recompute not in LLAMA_MODES:
        raise ConfigError("recompute", f"must be one of {', '.join(LLAMA_MODES)}, got {recompute!r}")
    routed = own_routed_tokens(decoder, layout, seq_length, routing)
    shape = own_llama_shape(decoder, layout, seq_length)
    return llama_rows(shape, layout.within_layer, recompute, routed_tokens=routed)
