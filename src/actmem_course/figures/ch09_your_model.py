"""Chapter 9: a layer in plain operators beside one with three changes."""

from __future__ import annotations

from dataclasses import replace

from actmem.rows import Row
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.layer_picture import block_picture, layer_blocks
from actmem_course.figures.marks import Drawing
from actmem_course.figures.sketch import Block
from actmem_course.figures.units import size_text
from actmem_more.llama_shape import LlamaShape

WRITTEN, CHANGED = "in plain operators", "with three changes"


def blocks_of(shape: LlamaShape, code: str) -> list[Block]:
    """What one Llama layer saves in 16 bits, as one of two codes has it.

    In plain operators a norm saves its input in float32 and what it is normalised to, keys and values are copied for
    each query head, and the MLP also saves silu(gate).
    """
    copies = shape.num_attention_heads // shape.num_key_value_heads
    wider = {"norm 1 input": (2, "4sbh"), "norm 2 input": (2, "4sbh"), "K": (copies, "2sbh"), "V": (copies, "2sbh")}
    also = {"norm 1 input": "norm 1, normalised", "norm 2 input": "norm 2, normalised", "gate": "silu(gate)"}
    found = []
    for block in layer_blocks(shape):
        term, size = block.row.term, block.row.bytes
        times, formula = wider.get(term, (1, block.formula)) if code == WRITTEN else (1, block.formula)
        found.append(replace(block, row=replace(block.row, bytes=times * size), held=times * size, formula=formula))
        if term in also:
            gone = code == CHANGED
            row, action = Row(also[term], size), "recompute" if gone else "keep"
            found.append(Block(row, size, size, action, not gone, formula=block.formula))
    return found


def saved_bytes(shape: LlamaShape, code: str) -> int:
    """Bytes that one layer saves."""
    return sum(block.on_device for block in blocks_of(shape, code))


def code_picture(shape: LlamaShape, code: str) -> Drawing:
    """The layer as one of two codes saves it."""
    return block_picture(blocks_of(shape, code), f"One layer {code} saves {size_text(saved_bytes(shape, code))}")


def code_bars(shape: LlamaShape, shown: str = CHANGED) -> Drawing:
    """What all layers save: in plain operators, and unless ``shown`` is that, with three changes."""
    codes = (WRITTEN, CHANGED) if shown == CHANGED else (WRITTEN,)
    saved = {code: shape.num_layers * saved_bytes(shape, code) for code in codes}
    return bar_chart(
        f"{shape.num_layers} layers save " + ",<br>".join(f"{size_text(size)} {code}" for code, size in saved.items()),
        {"saved": {WRITTEN: saved[WRITTEN], CHANGED: saved.get(CHANGED)}},
        "saved for backward",
        notes={} if shown == CHANGED else {CHANGED: "?"},
    )
