"""What a Llama layer saves for backward if its weights are frozen and low-rank adapters train."""

from collections.abc import Collection

from actmem.rows import Row, total
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows

#: Which linears read a term.  The attention kernel saves its output ("attention projection input") for itself as well.
READERS = {
    "QKV projection input": ("q", "k", "v"),
    "attention projection input": ("o",),
    "gate and up input": ("gate", "up"),
    "down input": ("down",),
}


ALL_LINEARS = tuple(name for names in READERS.values() for name in names)


#: The linears that have adapters, by the words of a figure.
PLACES = {"q and v": ("q", "v"), "attention": ("q", "k", "v", "o"), "all linears": ALL_LINEARS}


#: How an adapter computes: in the layer's 16 bits; in float32, as peft makes it; or, made in float32, in 16 bits under
#: autocast, as trainers run it.
IN_16_BITS, IN_FLOAT32, UNDER_AUTOCAST = ADAPTERS = ("16 bits", "float32", "float32, autocast")


REST, INPUTS, LOW, COPIES = "norms, attention, gate and up", "inputs of linears", "XA", "copies and masks"


def linear_sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    """Return a pair (input features, output features) for each linear of a layer, by its name in ALL_LINEARS."""
    h, f, heads, keys = shape.hidden_size, shape.ffn_hidden_size, shape.query_size, shape.key_value_size
    attention = {"q": (h, heads), "k": (h, keys), "v": (h, keys), "o": (heads, h)}
    return {**attention, "gate": (h, f), "up": (h, f), "down": (f, h)}


def adapter_parameters(shape: LlamaShape, places: Collection[str], rank: int) -> int:
    """Count the parameters of one layer's adapters: r(in + out) for each linear that has an adapter.

    Args:
        shape: the layer's sizes.
        places: the linears that have an adapter, names from ALL_LINEARS, such as ("q", "v").
        rank: r, the adapters' rank.
    """
    return sum(rank * sum(linear_sizes(shape)[name]) for name in places)


def adapter_rows(
    tokens: int,
    sizes: tuple[int, int],
    rank: int,
    adapters: str = IN_16_BITS,
    dropout: bool = False,
    mask_bytes: int = 1,
) -> list[Row]:
    """List what one adapter saves for backward.

    In 16 bits without dropout these are 2sb(in + r) bytes: the input, 2sb·in, which other linears may save too, and the
    narrow tensor between A and B. In float32, under autocast, or with dropout the adapter saves a copy of the input of
    its own.

    Args:
        tokens: s·b.
        sizes: (input features, output features) of the linear.
        rank: r, the adapter's rank.
        adapters: how the adapter computes: IN_16_BITS, IN_FLOAT32 or UNDER_AUTOCAST.
        dropout: whether the adapter's input has dropout.
        mask_bytes: bytes of an element of the dropout mask: 1 on a GPU; on a CPU the mask has the input's dtype.
    """
    size = 4 if adapters == IN_FLOAT32 else 2
    copies_input = adapters != IN_16_BITS or dropout
    rows = [Row(COPIES if copies_input else INPUTS, size * tokens * sizes[0]), Row(LOW, size * tokens * rank)]
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
    """List what one layer with frozen weights saves in 16 bits, with LoRA adapters at some of its linears.

    Gradients flow through the layer, because adapters in earlier layers train. Without adapters it saves what
    elementwise recomputation would leave: inputs of linears are needed only for gradients of weights.

    Args:
        shape: the layer's sizes.
        places: the linears that have an adapter, names from ALL_LINEARS, such as ("q", "v").
        rank: r, the rank of all adapters.
        adapters: how all adapters compute: IN_16_BITS, IN_FLOAT32 or UNDER_AUTOCAST.
        dropout: whether the adapters' inputs have dropout.
        mask_bytes: bytes of an element of a dropout mask: 1 on a GPU; on a CPU the mask has the input's dtype.

    Returns: rows with the terms REST (what the layer saves without adapters), INPUTS (inputs of linears), LOW (inputs
        times A) and COPIES (the adapters' own copies of inputs and weights, and dropout masks).
    """
    tokens, sizes = shape.seq_length * shape.micro_batch_size, linear_sizes(shape)
    rows = [Row(REST, total(llama_rows(shape, recompute="elementwise")))]
    for term, readers in READERS.items():
        kept = [adapter_rows(tokens, sizes[n], rank, adapters, dropout, mask_bytes) for n in readers if n in places]
        rows += [row for each in kept for row in each if row.term != INPUTS]
        if term != "attention projection input":
            rows += [row for each in kept[:1] for row in each if row.term == INPUTS]
    return rows
