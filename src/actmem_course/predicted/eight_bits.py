"""What a Llama layer saves for backward if its linears compute in 8 bits."""

from actmem.rows import Row
from actmem_course.predicted.adapters import READERS
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows

WIDE, NARROW, COPIES = "saved in 16 bits", "linears' inputs in 8 bits", "8-bit copies of weights"


def eight_bit_rows(shape: LlamaShape, orientations: int = 1) -> list[Row]:
    """List what one Llama layer saves if its four linears (QKV, projection, gate and up, down) compute in 8 bits.

    Each linear saves its input in 8 bits, in one or two ``orientations``; two 8-bit copies of its weight besides the
    16-bit one; and a float32 scale for the input and one for the weight. Attention's output stays in 16 bits too: the
    kernel's backward reads it.
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
    """Return the number of tokens from which 8-bit linears save memory.

    From there on the h + f bytes a token that they save are more than two 8-bit copies of each weight.
    """
    weights = shape.attention_weights + shape.mlp_weights
    return -(-2 * weights // (shape.hidden_size + shape.ffn_hidden_size))
