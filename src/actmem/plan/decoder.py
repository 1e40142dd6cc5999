"""Sizes of today's decoder: RMSNorm, rotary positions, grouped-query attention, a gated MLP, no biases."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.checks import check_divides, check_size


@dataclass(frozen=True)
class Decoder:
    """Sizes, with the letters of formulas in brackets: h, f, L, a, k, v.

    tied_embeddings: the output layer uses the word embedding's weight.  head_size (d): h/a unless it is given.
    qk_norm: an RMSNorm over each head's query and key.  num_experts (E), experts_per_token (κ): None for one MLP for all;
    ffn_hidden_size is then one expert's.  Raises ConfigError on a size that no model can have.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tied_embeddings: bool = False
    head_size: int = 0
    qk_norm: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads"):
            check_size(name, getattr(self, name))
        check_size("vocab_size", self.vocab_size)
        if not self.head_size:
            each = check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
            object.__setattr__(self, "head_size", each)
        check_size("head_size", self.head_size)
        check_divides("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)

    @property
    def query_size(self) -> int:
        """Elements of all heads' queries for one token: ad, which is h in most models."""
        return self.num_attention_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Elements of all heads' keys for one token: kd."""
        return self.num_key_value_heads * self.head_size

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's matrices around attention: Q and output 2h·ad, K and V 2h·kd."""
        return 2 * self.hidden_size * (self.query_size + self.key_value_size)

    @property
    def mlp_weights(self) -> int:
        """Elements of one gated MLP, of which a layer with experts has E: gate, up and down 3hf."""
        return 3 * self.hidden_size * self.ffn_hidden_size
