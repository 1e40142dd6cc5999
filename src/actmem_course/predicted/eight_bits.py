"""What a Llama layer saves for backward if its linears compute in 8 bits."""

from actmem.rows import Row
from actmem_course.predicted.adapters import READERS
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows

WIDE, NARROW, COPIES = "saved in 16 bits", "linears' inputs in 8 bits", "8-bit copies of weights"


def eight_bit_rows(shape: LlamaShape, orientations: int = 1) -> list[Row]:
    """List what one Llama layer saves if its four linears (QKV, projection, gate and up, down) compute in 8 bits.

    Each linear saves its input in 8 bits; two 8-bit copies of its weight, in addition to the 16-bit weight; and two
    float32 scales, of the input and of the weight. Attention's output is also saved in 16 bits, because the attention
    kernel's backward reads it.

    Args:
        shape: the layer's sizes.
        orientations: how many 8-bit copies of each input are saved: 1, or 2 if a transposed copy is saved as well.

    Returns: rows with the terms WIDE (saved in 16 bits), NARROW (the linears' inputs in 8 bits), COPIES (8-bit copies
        of weights) and "scales".
    """
    rows, elements = [], 0
    for row in llama_rows(shape):
        if row.term in READERS:
            elements += row.bytes // 2
        if row.term not in READERS or row.term == "attention projection input":
            rows.append(Row(WIDE, row.bytes, source=row.term))
    weights = shape.attention_weights + shape.mlp_weights
    return [
        *rows,
        Row(NARROW, orientations * elements),
        Row(COPIES, 2 * weights),
        Row("scales", 4 * 2 * len(READERS)),
    ]


def break_even_tokens(shape: LlamaShape) -> int:
    """Return the number of tokens from which on 8-bit linears take no more memory than 16-bit linears.

    8-bit inputs free h + f bytes per token; the two 8-bit copies of each weight cost a fixed number of bytes.

    Args:
        shape: the layer's sizes, of which the number of tokens isn't used.
    """
    weights = shape.attention_weights + shape.mlp_weights
    return -(-2 * weights // (shape.hidden_size + shape.ffn_hidden_size))
