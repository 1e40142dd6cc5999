"""Which rank holds which part of which tensor: one layer across t ranks, with and without sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.rows import Row, total
from actmem_course.show.boxes import EMPTY, Box, box_traces, diagram_layout, label_trace
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import FILLS, axis_unit, size_text, three_digits
from actmem_course.show.terms import term_of

TENSOR, SEQUENCE = "tensor parallel", "tensor + sequence parallel"
MODES = (TENSOR, SEQUENCE)

#: The exchange between two tensors, after the one named: with tensor parallelism alone, with sequence parallelism.
_ENTER = ("f: nothing forward, all-reduce backward", "g: all-gather forward, reduce-scatter backward")
_LEAVE = ("f̄: all-reduce forward, nothing backward", "ḡ: reduce-scatter forward, all-gather backward")
EXCHANGES_AFTER = {
    "QKV projection input": _ENTER,
    "attention projection input": _LEAVE,
    "h→4h input": _ENTER,
    "4h→h input": _LEAVE,
}
_HEADS = ("Q", "K", "V", *CORE_ATTENTION_TERMS)
_LEFT, _RANKS, _RIGHT, _HIGH = 3.6, 5.0, 1.3, 0.78


@dataclass(frozen=True)
class Part:
    """A stored tensor and how the ranks share it.  axis: "" (every rank has all of it), "h", "heads" or "s"."""

    row: Row
    axis: str


def parts(shape: ModelShape, tensor_parallel_size: int, mode: str) -> list[Part]:
    """The 15 tensors on one rank.  What tensor parallelism cuts is cut along h or by heads, the rest along s or not at all."""
    t = tensor_parallel_size
    alone = layer_rows(shape, Parallel(t))
    rows = layer_rows(shape, Parallel(t, mode == SEQUENCE))
    return [Part(row, _axis(row, before)) for row, before in zip(rows, alone, strict=True)]


def _axis(row: Row, with_tensor_parallelism: Row) -> str:
    if row.split_by == 1:
        return ""
    if with_tensor_parallelism.split_by == 1:
        return "s"
    return "heads" if row.term in _HEADS else "h"


def rank_parts(shape: ModelShape, tensor_parallel_size: int, mode: str) -> Drawing:
    """A line for each tensor, a frame for each rank with the part that it holds filled: along s downwards, along h to the right."""
    t, held = tensor_parallel_size, parts(shape, tensor_parallel_size, mode)
    column = _RANKS / t
    boxes: list[Box] = []
    names: list[tuple[float, float, str]] = []
    middle: list[tuple[float, float, str]] = [
        (_LEFT + (rank + 0.46) * column, -0.4, f"rank {rank}" if t < 8 else str(rank)) for rank in range(t)
    ]
    unit, unit_name = axis_unit(max(part.row.bytes for part in held))
    middle.append((_LEFT + _RANKS + _RIGHT / 2, -0.4, f"each, {unit_name}"))
    y = 0.0
    for part in held:
        names.append((_LEFT - 0.12, y + _HIGH / 2, part.row.term))
        middle.append((_LEFT + _RANKS + _RIGHT / 2, y + _HIGH / 2, three_digits(part.row.bytes / unit)))
        for rank in range(t):
            boxes += _frame(part, rank, t, _LEFT + rank * column, y, 0.92 * column)
        y += 1
        if part.row.term in EXCHANGES_AFTER:
            middle.append((_LEFT + _RANKS / 2, y + 0.3, f"<i>{EXCHANGES_AFTER[part.row.term][mode == SEQUENCE]}</i>"))
            y += 0.8
    copies = [part.row for part in held if not part.axis]
    together = total(part.row for part in held)
    finding = (
        f"{len(copies)} of {len(held)} tensors are there {t} times over, {size_text(total(copies))} on each"
        if copies
        else "each byte is on one rank only"
    )
    finding = finding if t > 1 else "one rank has everything"
    layout = diagram_layout(_LEFT + _RANKS + _RIGHT, y)
    layout["yaxis"] = {**layout["yaxis"], "range": [y, -0.8]}
    return Drawing(
        [*box_traces(boxes), label_trace(names, 13, "middle left"), label_trace(middle, 12)],
        {
            **layout,
            "title": {"text": f"{mode.capitalize()}: each of {t} ranks keeps {size_text(together)};<br>{finding}"},
            "height": 660,
        },
        f"One layer across {t} ranks, {mode}: each rank keeps {together:,} bytes; {finding}. "
        + "; ".join(f"{part.row.term} {_words(part.axis)}" for part in held)
        + ".",
    )


def _words(axis: str) -> str:
    return {"": "whole", "heads": "cut by heads"}.get(axis, f"cut along {axis}")


def _frame(part: Part, rank: int, t: int, x: float, y: float, width: float) -> list[Box]:
    fill = FILLS[term_of(part.row).kind]
    hover = f"<b>{part.row.term}</b> on rank {rank}: {_words(part.axis)}, {part.row.bytes:,} B"
    if part.axis == "":
        return [Box(x, y, width, _HIGH, fill, "", hover)]
    frame = Box(x, y, width, _HIGH, EMPTY, "", hover)
    if part.axis == "s":
        return [frame, Box(x, y + rank * _HIGH / t, width, _HIGH / t, fill, "", hover)]
    return [frame, Box(x + rank * width / t, y, width / t, _HIGH, fill, "", hover)]
