"""Chapter 12: what a Llama layer keeps if its weights are frozen and low-rank adapters train, beside what it keeps if all train."""

from __future__ import annotations

from collections.abc import Collection

from actmem.rows import Row, total
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import Drawing
from actmem_course.show.style import PAINT, three_digits
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
#: How an adapter computes: in the layer's 16 bits; in float32, as peft makes it; the same under autocast, as trainers run it.
IN_16_BITS, IN_FLOAT32, UNDER_AUTOCAST = ADAPTERS = ("16 bits", "float32", "float32, autocast")
_REST, _INPUTS, _LOW, _COPIES = "norms, attention, SwiGLU", "inputs of linears", "XA", "copies and masks"
_FILLS = {_REST: PAINT["green"], _INPUTS: PAINT["blue"], _LOW: PAINT["orange"], _COPIES: PAINT["red"]}


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
    """What one adapter keeps: 2sb(in + r) in 16 bits, whose input others may share; a copy of its own in any other form.

    sizes: inputs and outputs.  mask_bytes: of an element of dropout's mask, 1 on a GPU; on a CPU it has x's dtype.
    """
    size = 4 if adapters == IN_FLOAT32 else 2
    own = adapters != IN_16_BITS or dropout
    rows = [Row(_COPIES if own else _INPUTS, size * tokens * sizes[0]), Row(_LOW, size * tokens * rank)]
    if dropout:
        rows.append(Row(_COPIES, mask_bytes * tokens * sizes[0]))
    if adapters == UNDER_AUTOCAST:
        rows.append(Row(_COPIES, 2 * rank * sum(sizes), source="A and B in 16 bits"))
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
    rows = [Row(_REST, total(llama_rows(shape, recompute="elementwise")))]
    for term, readers in READERS.items():
        kept = [adapter_rows(tokens, sizes[n], rank, adapters, dropout, mask_bytes) for n in readers if n in places]
        rows += [row for each in kept for row in each if row.term != _INPUTS]
        if term != "attention projection input":
            rows += [row for each in kept[:1] for row in each if row.term == _INPUTS]
    return rows


def adapter_bars(
    shape: LlamaShape, where: str, rank: int, adapters: str = IN_16_BITS, dropout: bool = False
) -> Drawing:
    """What all layers keep of one sequence if every weight trains, with adapters, and with no weight that trains; one GPU, 16 bits."""
    whole = llama_rows(shape)
    inputs = total(row for row in whole if row.term in READERS and row.term != "attention projection input")
    each = {
        "all weights train": [Row(_REST, total(whole) - inputs), Row(_INPUTS, inputs)],
        "LoRA": lora_rows(shape, PLACES[where], rank, adapters, dropout),
        "all weights frozen": lora_rows(shape, ()),
    }
    parts = {
        part: {name: shape.num_layers * total(row for row in rows if row.term == part) for name, rows in each.items()}
        for part in _FILLS
    }
    trained = adapter_parameters(shape, PLACES[where], rank) / (shape.attention_weights + shape.mlp_weights)
    return bar_chart(
        f"Adapters on {where} train {three_digits(100 * trained)}% of the layers' weights,<br>"
        f"and keep {three_digits(100 * total(each['LoRA']) / total(whole))}% of the bytes of full training",
        parts,
        f"kept by {shape.num_layers} layers",
        fills=tuple(_FILLS.values()),
    )
