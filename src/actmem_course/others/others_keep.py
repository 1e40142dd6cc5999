"""What one Llama layer of other implementations saves in 16 bits: read from their operators, on CPUs.

Letters are those of LlamaShape; d elements of a head.  transformers 5.23, torch 2.13.
"""

from __future__ import annotations

from actmem_more.llama_shape import LlamaShape

#: Bytes of each product of sizes, by implementation.
OTHERS = {
    # Each RMSNorm saves its float32 input and x̂, where its input is enough; silu(gate) lies beside gate and up.
    "Hugging Face Llama, sdpa": {"sbh": 20, "sbkd": 4, "sbf": 8, "asb": 4, "sb": 8, "sd": 4},
    # The compiler's partitioner saves nothing twice and nothing upcast.
    "torchtitan's style, torch.compile": {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
    "ours": {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
    "ours, elementwise": {"sbh": 8, "sbkd": 4, "sbf": 4, "asb": 4, "sb": 8},
}


def bytes_of_other(name: str, shape: LlamaShape) -> int:
    """Bytes of one layer on one rank; name: a key of OTHERS."""
    tokens, d = shape.seq_length * shape.micro_batch_size, shape.d
    products = {
        "sbh": tokens * shape.hidden_size,
        "sbkd": tokens * shape.num_key_value_heads * d,
        "sbf": tokens * shape.ffn_hidden_size,
        "asb": shape.num_attention_heads * tokens,
        "sb": tokens,
        "sd": shape.seq_length * d,
    }
    return sum(count * products[product] for product, count in OTHERS[name].items())
