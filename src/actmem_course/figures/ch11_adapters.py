"""Chapter 11: bytes that Llama layers save for backward if all weights train, and if only adapters do."""

from actmem.rows import Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.layer_picture import layer_picture
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import three_digits
from actmem_course.predicted.adapters import (
    COPIES,
    IN_16_BITS,
    INPUTS,
    LOW,
    PLACES,
    READERS,
    REST,
    adapter_parameters,
    lora_rows,
)
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows

#: Parts of a bar: the terms in each, and its fill.  XA alone is too narrow to be seen.
_PARTS = {
    REST: ((REST,), FILLS["activations"]),
    INPUTS: ((INPUTS,), FILLS["input of a linear"]),
    "adapters' copies, masks and XA": ((LOW, COPIES), FILLS["dropout mask"]),
}


#: For each choice of weights that train, the terms of the layer that no gradient reads.
UNREAD = {
    "all train": (),
    "adapters on q and v": ("gate and up input", "down input"),
    "all frozen": ("QKV projection input", "gate and up input", "down input"),
}


def frozen_layer(shape: LlamaShape, weights: str) -> Drawing:
    """Draw the tensors that one layer saves if only some of its weights train.

    The adapters' intermediate result (their input times A) is left out: it would be too narrow to see.

    Args:
        shape: The layer's sizes.
        weights: Which weights train, a key of UNREAD: "all train", "adapters on q and v" or "all frozen".
    """
    return layer_picture(shape, not_saved=UNREAD[weights])


def adapter_bars(
    shape: LlamaShape, where: str, rank: int, adapters: str = IN_16_BITS, dropout: bool = False
) -> Drawing:
    """Draw the bytes that all layers save if all weights train, if only LoRA adapters train, and if nothing trains.

    The bytes are those of one microbatch on one GPU, in 16 bits.

    Args:
        shape: The model's sizes, with ``num_layers``.
        where: The linears that have adapters: "q and v", "attention" or "all linears" (the keys of PLACES).
        rank: r, the adapters' rank.
        adapters: How the adapters compute: "16 bits", "float32" or "float32, autocast".
        dropout: Whether the adapters' inputs have dropout.
    """
    whole = llama_rows(shape)
    inputs = total(row for row in whole if row.term in READERS and row.term != "attention projection input")
    each = {
        "all weights train": [Row(REST, total(whole) - inputs), Row(INPUTS, inputs)],
        "LoRA": lora_rows(shape, PLACES[where], rank, adapters, dropout),
        "all weights frozen": lora_rows(shape, ()),
    }
    parts = {
        part: {name: shape.num_layers * total(row for row in rows if row.term in terms) for name, rows in each.items()}
        for part, (terms, _) in _PARTS.items()
    }
    trained = adapter_parameters(shape, PLACES[where], rank) / (shape.attention_weights + shape.mlp_weights)
    return bar_chart(
        f"Adapters on {where} train {three_digits(100 * trained)}% of the layers' weights,<br>"
        f"but the layers save {three_digits(100 * total(each['LoRA']) / total(whole))}% of full training's bytes",
        parts,
        f"saved for backward by {shape.num_layers} layers",
        fills=[fill for _, fill in _PARTS.values()],
    )
