"""Chapter 9: a Llama layer written in plain operators, and the same layer after three changes that save memory."""

from dataclasses import replace

from actmem.rows import Row
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.checks import Fold
from actmem_course.figures.layer_picture import block_picture, layer_blocks
from actmem_course.figures.marks import Drawing
from actmem_course.figures.sketch import Block
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_course.others.published_runs import published_runs
from actmem_more.llama_shape import LlamaShape

WRITTEN, CHANGED = "in plain operators", "with three changes"


def blocks_of(shape: LlamaShape, code: str) -> list[Block]:
    """List what one Llama layer saves for backward in 16 bits, in one of two versions of its code.

    In plain operators (WRITTEN) a norm saves its input in float32 and also the normalised input, K and V are copied
    for each query head, and the MLP also saves silu(gate). The other version (CHANGED) saves a norm's input in 16 bits,
    K and V once, and neither the normalised input nor silu(gate).

    Args:
        shape: The layer's sizes.
        code: The version of the code: WRITTEN or CHANGED.
    """
    copies = shape.num_attention_heads // shape.num_key_value_heads
    wider = {"norm 1 input": (2, "4sbh"), "norm 2 input": (2, "4sbh"), "K": (copies, "2sbh"), "V": (copies, "2sbh")}
    also = {"norm 1 input": "norm 1, normalised", "norm 2 input": "norm 2, normalised", "gate": "silu(gate)"}
    blocks = []
    for block in layer_blocks(shape):
        term, size = block.row.term, block.row.bytes
        times, formula = wider.get(term, (1, block.formula)) if code == WRITTEN else (1, block.formula)
        blocks.append(replace(block, row=replace(block.row, bytes=times * size), held=times * size, formula=formula))
        if term in also:
            row, action = Row(also[term], size), "keep" if code == WRITTEN else "recompute"
            is_present = code == WRITTEN
            blocks.append(Block(row, size, held=size, action=action, is_present=is_present, formula=block.formula))
    return blocks


def saved_bytes(shape: LlamaShape, code: str) -> int:
    """Return the bytes that one Llama layer saves for backward in 16 bits.

    Args:
        shape: The layer's sizes.
        code: The version of the layer's code: WRITTEN (plain operators), or CHANGED (three changes that save memory).
    """
    return sum(block.on_device for block in blocks_of(shape, code))


def code_picture(shape: LlamaShape, code: str) -> Drawing:
    """Draw the tensors that one Llama layer saves for backward.

    Args:
        shape: The layer's sizes.
        code: The version of the layer's code: WRITTEN (plain operators), or CHANGED (three changes that save memory).
    """
    return block_picture(blocks_of(shape, code), f"One layer {code} saves {size_text(saved_bytes(shape, code))}")


def code_bars(shape: LlamaShape, shown: str = CHANGED) -> Drawing:
    """Draw two bars: the bytes that all layers of a Llama save in each of the two versions of its code.

    Args:
        shape: The model.
        shown: WRITTEN (plain operators) leaves the second bar empty; CHANGED (norms, K and V, and the MLP changed so
            that they save less) fills it.
    """
    codes = (WRITTEN, CHANGED) if shown == CHANGED else (WRITTEN,)
    saved = {code: shape.num_layers * saved_bytes(shape, code) for code in codes}
    return bar_chart(
        f"{shape.num_layers} layers save " + ",<br>".join(f"{size_text(size)} {code}" for code, size in saved.items()),
        {"saved": {WRITTEN: saved[WRITTEN], CHANGED: saved.get(CHANGED)}},
        "saved for backward",
        notes={} if shown == CHANGED else {CHANGED: "?"},
    )


def published_bars() -> Drawing:
    """Draw peaks that others published of their training runs, each with our prediction for the same run."""
    runs = [run for run in published_runs() if run.predicted_bytes is not None]
    kinds = dict.fromkeys(run.kind for run in runs)
    fills = dict(zip(kinds, ("activations", "others", "second number")))
    near = sum(abs(run.difference_percent or 0) <= 3 for run in runs)
    return bar_chart(
        f"Published peaks: {near} of {len(runs)} are predicted within 3%",
        {kind: {run.name: run.published_bytes for run in runs if run.kind == kind} for kind in kinds},
        "peak of one GPU",
        fills=[FILLS[fills[kind]] for kind in kinds],
        order=[run.name for run in runs],
        notes={
            run.name: f"{size_text(run.published_bytes)}, predicted {size_text(run.predicted_bytes or 0)}"
            for run in runs
        },
        about={run.name: f"{run.difference_percent:+.1f}%" for run in runs},
    )


def published_causes() -> Fold:
    """Return a line with the number of published runs whose prediction is more than 3% off.

    A click on the line shows these runs, each with the cause of the difference.
    """
    runs = [run for run in published_runs() if abs(run.difference_percent or 0) > 3]
    return Fold(
        f"Why {len(runs)} of them are more than 3% off",
        "\n".join(f"{run.name}, {run.difference_percent:+.1f}%: {run.why}" for run in runs),
        prose=True,
    )
