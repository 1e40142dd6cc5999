"""What one Llama layer of other implementations saves in 16 bits, as formulas: read from their operators, on CPUs.

Letters are those of LlamaShape; d elements of a head.  transformers 5.23, torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem_more.llama_shape import LlamaShape


@dataclass(frozen=True)
class OtherLayer:
    """One implementation.  terms: bytes of each product of sizes."""

    name: str
    terms: dict[str, int]
    dtype: str = "bfloat16"

    @property
    def formula(self) -> str:
        """Such as ``20sbh + 8sbf``."""
        return " + ".join(f"{count}{product}" for product, count in self.terms.items())


def bytes_of_other(layer: OtherLayer, shape: LlamaShape) -> int:
    """Bytes of the layer on one rank."""
    tokens, d = shape.seq_length * shape.micro_batch_size, shape.d
    products = {
        "sbh": tokens * shape.hidden_size,
        "sbkd": tokens * shape.num_key_value_heads * d,
        "sbf": tokens * shape.ffn_hidden_size,
        "asb": shape.num_attention_heads * tokens,
        "sb": tokens,
        "sd": shape.seq_length * d,
    }
    return sum(count * products[product] for product, count in layer.terms.items())


OTHERS = (
    # Each RMSNorm saves its float32 input and x̂, where its input is enough; silu(gate) lies beside gate and up.
    OtherLayer("Hugging Face Llama, sdpa", {"sbh": 20, "sbkd": 4, "sbf": 8, "asb": 4, "sb": 8, "sd": 4}),
    OtherLayer("ours", {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8}),
    OtherLayer("ours, elementwise", {"sbh": 8, "sbkd": 4, "sbf": 4, "asb": 4, "sb": 8}),
)
#: The compiler's partitioner saves nothing twice and nothing upcast.
FRAMEWORKS = (OtherLayer("torchtitan's style, torch.compile", {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8}),)
