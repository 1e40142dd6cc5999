"""Sizes of today's decoder: RMSNorm, rotary positions, grouped-query attention, a gated MLP, no biases."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.checks import check_divides, check_size


@dataclass(frozen=True)
class Decoder:
    """Sizes, with the letters of formulas in brackets: h, f, L, a, k, v.

    tied_embeddings: the output layer uses the word embedding's weight.  Raises ConfigError on a
    size that no model can have.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads"):
            check_size(name, getattr(self, name))
        check_size("vocab_size", self.vocab_size)
        check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        check_divides("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)

    @property
    def key_value_size(self) -> int:
        """Elements of all heads' keys for one token: kh/a."""
        return self.num_key_value_heads * (self.hidden_size // self.num_attention_heads)

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices: Q and output 2h², K and V 2h·kd, gate, up and down 3hf."""
        h = self.hidden_size
        return 2 * h * h + 2 * h * self.key_value_size + 3 * h * self.ffn_hidden_size
