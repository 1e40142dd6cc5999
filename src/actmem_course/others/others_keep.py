"""What one layer of other implementations keeps, as formulas: read from their operators, checked by ``measure_peers --today``.

A formula is a sum of products of sizes: s, b, h, a, k, f as in LlamaShape, d elements of a head, E experts,
κ experts a token.  On CPUs; transformers 5.23, torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.llama_shape import LlamaShape


@dataclass(frozen=True)
class OtherLayer:
    """One implementation.  coefficients: of each product of sizes, in bytes.  why: who keeps more than needed, and the way out.

    dtype: of its activations.  dropout: whether it is on.
    """

    name: str
    dtype: str
    coefficients: dict[str, int]
    why: str
    dropout: bool = False

    @property
    def formula(self) -> str:
        """Such as ``20sbh + 4sbkd``."""
        return " + ".join(f"{count}{product}" for product, count in self.coefficients.items())


def bytes_of_other(layer: OtherLayer, shape: LlamaShape) -> int:
    """Its bytes at these sizes."""
    s, b, h, a = shape.seq_length, shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads
    k, f, d = shape.num_key_value_heads, shape.ffn_hidden_size, shape.d
    experts, taken = shape.num_experts or 0, shape.experts_per_token or 0
    products = {
        "sbh": s * b * h,
        "sbkd": s * b * k * d,
        "sbf": s * b * f,
        "as²b": a * s * s * b,
        "asb": a * s * b,
        "sb": s * b,
        "sd": s * d,
        "sbκh": s * b * taken * h,
        "sbκf": s * b * taken * f,
        "sbκ": s * b * taken,
        "sbE": s * b * experts,
        "E": experts,
    }
    return sum(count * products[product] for product, count in layer.coefficients.items())


_NORM = (
    "each RMSNorm keeps its float32 input and x̂ (6sbh), where its input (2sbh) is enough; silu(gate) and its product with "
    "up lie beside gate and up: fuse both"
)
_FLOAT32 = "x̂ lies beside each norm's input, and silu(gate) beside gate and up: fuse both; nothing is upcast in 32 bits"
_SCORES = "eager attention keeps the softmax's weights and a copy of K and V for each query head: a flash kernel keeps neither"
_EXPERTS = (
    "keeps each expert's tokens, its output and all E probabilities: dispatch again in backward, and multiply by the "
    "routing weight before the down product"
)

OTHERS = (
    OtherLayer(
        "Hugging Face Llama, sdpa", "bfloat16", {"sbh": 20, "sbkd": 4, "sbf": 8, "asb": 4, "sb": 8, "sd": 4}, _NORM
    ),
    OtherLayer(
        "Hugging Face Llama, sdpa",
        "float32",
        {"sbh": 32, "sbkd": 8, "sbf": 16, "asb": 4, "sb": 8, "sd": 8},
        _FLOAT32,
    ),
    OtherLayer("Hugging Face Llama, eager", "bfloat16", {"sbh": 24, "sbf": 8, "as²b": 6, "sb": 8, "sd": 4}, _SCORES),
    OtherLayer("Hugging Face Llama, eager", "float32", {"sbh": 40, "sbf": 16, "as²b": 4, "sb": 8, "sd": 8}, _SCORES),
    OtherLayer(
        "Hugging Face GPT-2, eager",
        "bfloat16",
        {"sbh": 60, "as²b": 6, "sb": 8},
        "gelu_new's four operations keep 32sbh: F.gelu(approximate='tanh') keeps 8; masks of 2 bytes: 1 on a GPU",
        dropout=True,
    ),
    OtherLayer(
        "Hugging Face GPT-2, sdpa",
        "bfloat16",
        {"sbh": 66, "as²b": 12, "sb": 8},
        "with dropout sdpa falls back to its math form on a CPU, and keeps more than eager: turn dropout off",
        dropout=True,
    ),
    OtherLayer(
        "Hugging Face GPT-2, sdpa",
        "bfloat16",
        {"sbh": 56, "asb": 4, "sb": 8},
        "no scores without dropout; gelu_new keeps 32sbh as before",
    ),
    OtherLayer(
        "Hugging Face Mixtral's experts, eager",
        "bfloat16",
        {"sbh": 2, "sbκh": 6, "sbκf": 8, "sbE": 4, "sbκ": 32, "sb": 4},
        _EXPERTS,
    ),
    OtherLayer(
        "Hugging Face Mixtral's experts, grouped_mm",
        "bfloat16",
        {"sbh": 2, "sbκh": 4, "sbκf": 8, "sbE": 4, "sbκ": 40, "sb": 4, "E": 4},
        _EXPERTS,
    ),
    OtherLayer(
        "ours",
        "bfloat16",
        {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
        "nothing twice, nothing in a wider type",
    ),
    OtherLayer(
        "ours, elementwise",
        "bfloat16",
        {"sbh": 8, "sbkd": 4, "sbf": 4, "asb": 4, "sb": 8},
        "what needs no matrix product is made again",
    ),
    OtherLayer(
        "ours, experts", "bfloat16", {"sbh": 2, "sbκf": 6, "sbκ": 24}, "tokens are dispatched again in backward"
    ),
)
