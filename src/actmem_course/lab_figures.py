"""What labs measured, as figures for a page of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds


def write_page(drawing: Drawing, path: Path) -> None:
    """Write a drawing as one page that needs no network."""
    path.write_text(f"<!doctype html><meta charset=utf-8>\n{figure_html(drawing)}\n", encoding="utf-8")


def figure_html(drawing: Drawing, with_plotly: bool = True) -> str:
    """A drawing as HTML, with plotly's own code in it, of which a page needs one copy."""
    import plotly.graph_objects as go  # loaded only to write

    spec = drawing.spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    return figure.to_html(full_html=False, include_plotlyjs=with_plotly, config=spec["config"])


def speed_figure(rows: Sequence[Mapping[str, Any]], setting: str) -> Drawing:
    """Figure 8, measured here: a bar for each variant, in parts: forward, recomputation, backward; the first on top.

    Args:
        rows: of labs/measure_speed.py.
        setting: what was run where, in one line.
    """
    notes = {row["name"]: f"{milliseconds(row['forward_seconds'] + row['backward_seconds'])} ms" for row in rows}
    for row in rows:
        if row["over"]:
            notes[row["name"]] += f", {overhead_text(row['over'])}"
    again = {row["name"]: 1000 * row["recompute_seconds"] for row in rows}
    drawing = bar_chart(
        overhead_finding(rows),
        {
            "forward": {row["name"]: 1000 * row["forward_seconds"] for row in rows},
            "forward again, in backward": again,
            "backward": {row["name"]: 1000 * row["backward_seconds"] - again[row["name"]] for row in rows},
        },
        "one layer, one microbatch",
        "ms",
        fills=[FILLS[what] for what in ("forward", "recomputed", "backward")],
        notes=notes,
    )
    title = {**drawing.layout["title"], "subtitle": {"text": setting}}
    return replace(drawing, layout={**drawing.layout, "title": title})


def overhead_finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figure's title: what recomputing everything costs here, and what recomputing the core does."""
    by_mode = {(row["recompute"], row["sequence_parallel"]): row["over"] for row in rows}
    full, ours = by_mode[("full", False)], by_mode[("selective", True)]
    return f"Full recomputation costs {_cost(full)}, selective with sequence parallelism {_cost(ours)}"


def _cost(over: Mapping[str, Any] | None) -> str:
    if over is None:
        return "nothing"
    return f"{100 * over['value']:+.0f}%" if over["is_real"] else f"less than {math.ceil(100 * over['within'])}%"
