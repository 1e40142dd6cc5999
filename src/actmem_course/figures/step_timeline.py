"""Draw the memory of one training step over time, by kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from actmem_course.figures.marks import Drawing, chart, legend, line, scale
from actmem_course.figures.style import FILLS, INK, Fill
from actmem_course.figures.units import axis_unit, size_text

if TYPE_CHECKING:  # pages have no torch
    from actmem.ledger.ledger_tables import SavedTensor
    from actmem.ledger.whole_step import StepBill

#: The part of the timeline for each kind of a step's bill; ``FILLS`` has the same names.
_PARTS = {
    **dict.fromkeys(("weight", "buffer", "cast weight", "gathered weight"), "weights"),
    "optimizer state": "optimizer states",
    **dict.fromkeys(("gradient", "main gradient"), "gradients"),
    **dict.fromkeys(("activation", "recomputed activation", "input", "output"), "activations"),
}
_FILLS = {part: FILLS[part] for part in _PARTS.values()}
_REST = "everything else"


def step_timeline(
    bill: StepBill,
    of: str,
    parts: Mapping[str, Fill] = _FILLS,
    part_of: Callable[[SavedTensor], str] = lambda row: _PARTS.get(row.kind, _REST),
) -> Drawing:
    """Draw the bytes alive after each operation of a training step as stacked areas, with phases and the peak marked.

    Args:
        bill: The record of the step that ``watch_step`` made: every tensor, when it was alive, and its bytes.
        of: A text for the title that says what the step trains, such as "one layer's step".
        parts: The areas from the bottom, by name, each with its fill; by default one for each kind of tensor.
        part_of: Returns the name of the area to which a tensor belongs, or ``"everything else"``.
    """
    fills = {**parts, _REST: FILLS["transient"]}
    alive = {part: [0] * len(bill.curve) for part in fills}
    for row, sizes in bill.lives:
        part = alive[part_of(row)]
        for (start, size), (end, _) in zip(sizes, [*sizes[1:], (len(bill.curve), 0)]):
            for moment in range(start, end):
                part[moment] += size
    unit, name = axis_unit(bill.peak_bytes)
    fills = {part: fill for part, fill in fills.items() if any(alive[part])}
    areas = [
        line(
            part, range(len(bill.curve)), [size / unit for size in alive[part]], INK, f"{part}: %{{y:.2f}} {name}",
            width=1, shape="hv", stackgroup="alive", showlegend=False,
            fillcolor=fill.colour, fillpattern=fill.texture() | {"bgcolor": fill.colour},
        )
        for part, fill in fills.items()
    ]  # fmt: skip
    ends = [*(start for _, start in bill.phases[1:]), len(bill.curve)]
    phases = [(what, start) for (what, start), end in zip(bill.phases, ends) if end > start]
    top = bill.peak_bytes / unit
    border = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": INK, "dash": "dot"}}
    named = {"y": 1.18 * top, "xanchor": "left", "xshift": 4, "showarrow": False}
    return chart(
        f"The peak of {of}, {size_text(bill.peak_bytes)}, comes in {bill.peak_phase}",
        [*legend(fills), *areas],
        f"Areas over {len(bill.curve)} operations; at the peak, in {bill.peak_phase}: "
        + ", ".join(f"{part} {size_text(sizes[bill.peak_at])}" for part, sizes in alive.items() if part in fills)
        + ".",
        xaxis=scale("operations since the step began", 0, len(bill.curve)),
        yaxis=scale(f"alive ({name})", 0, 1.25 * top),
        shapes=[{**border, "x0": start, "x1": start} for _, start in phases[1:]],
        annotations=[
            *({**named, "x": start, "text": what} for what, start in phases),
            {**named, "x": bill.peak_at, "y": top, "yanchor": "bottom", "text": "peak"},
        ],
    )
