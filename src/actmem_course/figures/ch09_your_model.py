"""Chapter 9: a layer in plain operators beside one with three changes, and what to change where a plan doesn't fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actmem.rows import Row
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.layer_picture import block_picture, layer_blocks
from actmem_course.figures.marks import Drawing
from actmem_course.figures.sketch import Block
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.plan_report import layout_text
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Bill, Plan, bill_of, find_plans
from actmem_tools.plan.step_time import GIBIBYTE, Cluster

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


#: A plan of ``MODEL`` on 64 GPUs of ``MEMORY`` that doesn't fit, and changes to its layout and mode, one after the
#: other: at each point the one that frees a GiB for the least estimated time.
MODEL, MEMORY, SEQUENCES = "llama3-70b", 80 * GIBIBYTE, 512
CHANGES: dict[str, tuple[dict[str, int], str]] = {
    "": (
        {
            "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 4, "context_parallel_size": 1,
            "num_model_chunks": 1, "micro_batch_size": 2, "sequence_parallel": False, "zero_stage": 1,
        },
        "none",
    ),
    "sequence parallelism": ({"sequence_parallel": True}, "none"),
    "elementwise recomputation": ({}, "elementwise"),
    "one sequence a microbatch": ({"micro_batch_size": 1}, "elementwise"),
    "twice the stages, half the replicas": ({"pipeline_parallel_size": 4, "data_parallel_size": 2}, "elementwise"),
    "two ranks a sequence, half the replicas": ({"context_parallel_size": 2, "data_parallel_size": 1}, "elementwise"),
    "full recomputation": ({}, "full"),
}  # fmt: skip


def plan_with(sizes: Mapping[str, int], mode: str) -> Plan:
    """The plan of one layout, with room for everything, so that one that doesn't fit has its bytes and seconds too."""
    model = planned_model_of(MODEL).with_modes([mode])
    (plan,) = find_plans(model, Cluster(64, 100 * MEMORY), SEQUENCES, 1, sizes).plans
    return plan


def changes_in_order() -> Drawing:
    """What the fullest GPU holds of a plan that doesn't fit, as one change comes after the other."""
    bills: dict[str, Bill] = {}
    sizes: dict[str, int] = {}
    for words, (changed, mode) in CHANGES.items():
        sizes |= changed
        plan = plan_with(sizes, mode)
        bills[words or layout_text(plan.layout)] = bill_of(planned_model_of(MODEL).with_modes([mode]), plan)
    start, limit = next(iter(bills)), Cluster(64, MEMORY).usable_bytes
    parts = dict.fromkeys(part for bill in bills.values() for part in bill.by_part())
    return bar_chart(
        f"{MODEL}, {start}: {size_text(bills[start].bytes - limit)} too much.<br>"
        "Each bar adds a change, the cheapest first",
        {part: {name: bill.by_part().get(part, 0) for name, bill in bills.items()} for part in parts},
        "held by the fullest GPU",
        fills=[FILLS[part] for part in parts],
        limit=("what a plan may use", limit),
    )
