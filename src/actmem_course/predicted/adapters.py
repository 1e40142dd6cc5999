"""What a Llama layer saves for backward if its weights are frozen and low-rank adapters train."""

from __future__ import annotations

from collections.abc import Collection

from actmem.rows import Row, total
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows

#: Which linears read a term.  The kernel keeps attention's output for itself as well.
READERS = {
    "QKV projection input": ("q", "k", "v"),
    "attention projection input": ("o",),
    "gate and up input": ("gate", "up"),
    "down input": ("down",),
}


ALL_LINEARS = tuple(name for names in READERS.values() for name in names)


#: Where adapters are, in a figure's words.
PLACES = {"q and v": ("q", "v"), "attention": ("q", "k", "v", "o"), "all linears": ALL_LINEARS}


#: How an adapter computes: in the layer's 16 bits; in float32, as peft makes it; the same under autocast, as trainers
#: run it.
IN_16_BITS, IN_FLOAT32, UNDER_AUTOCAST = ADAPTERS = ("16 bits", "float32", "float32, autocast")


REST, INPUTS, LOW, COPIES = "norms, attention, gate and up", "inputs of linears", "XA", "copies and masks"


def linear_sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear of a layer."""
    h, f, heads, keys = shape.hidden_size, shape.ffn_hidden_size, shape.query_size, shape.key_value_size
    attention = {"q": (h, heads), "k": (h, keys), "v": (h, keys), "o": (heads, h)}
    return {**attention, "gate": (h, f), "up": (h, f), "down": (f, h)}


def adapter_parameters(shape: LlamaShape, places: Collection[str], rank: int) -> int:
    """Elements of A and B of one layer: r(in + out) each."""
    return sum(rank * sum(linear_sizes(shape)[name]) for name in places)


def adapter_rows(
    tokens: int,
    sizes: tuple[int, int],
    rank: int,
    adapters: str = IN_16_BITS,
    dropout: bool = False,
    mask_bytes: int = 1,
) -> list[Row]:
    """What one adapter keeps: 2sb(in + r) in 16 bits, whose input others may share; a copy of its own in any other
    form.

    sizes: inputs and outputs.  mask_bytes: of an element of dropout's mask, 1 on a GPU; on a CPU it has x's dtype.
    """
    size = 4 if adapters == IN_FLOAT32 else 2
    own = adapters != IN_16_BITS or dropout
    rows = [Row(COPIES if own else INPUTS, size * tokens * sizes[0]), Row(LOW, size * tokens * rank)]
    if dropout:
        rows.append(Row(COPIES, mask_bytes * tokens * sizes[0]))
    if adapters == UNDER_AUTOCAST:
        rows.append(Row(COPIES, 2 * rank * sum(sizes), source="A and B in 16 bits"))
    return rows


def lora_rows(
    shape: LlamaShape,
    places: Collection[str] = ALL_LINEARS,
    rank: int = 16,
    adapters: str = IN_16_BITS,
    dropout: bool = False,
    mask_bytes: int = 1,
) -> list[Row]:
    """What one layer of frozen weights keeps in 16 bits, with adapters at ``places``, by the figure's parts.

    A gradient flows through it: an adapter below it trains.  Without adapters it keeps what elementwise recomputation
    leaves, since only the weights' gradients read a linear's input.
    """
    tokens, sizes = shape.seq_length * shape.micro_batch_size, linear_sizes(shape)
    rows = [Row(REST, total(llama_rows(shape, recompute="elementwise")))]
    for term, readers in READERS.items():
        kept = [adapter_rows(tokens, sizes[n], rank, adapters, dropout, mask_bytes) for n in readers if n in places]
        rows += [row for each in kept for row in each if row.term != INPUTS]
        if term != "attention projection input":
            rows += [row for each in kept[:1] for row in each if row.term == INPUTS]
    return rows
