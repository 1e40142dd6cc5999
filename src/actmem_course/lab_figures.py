"""What labs measured, as figures for a page of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds
from actmem_course.results import SpeedLine

_PARTS = {
    "forward": FILLS["forward"],
    "forward again, in backward": FILLS["recomputed"],
    "backward": FILLS["backward"],
}


def write_page(drawing: Drawing, path: Path) -> None:
    """Write a drawing as one page that needs no network."""
    import plotly.graph_objects as go  # loaded only to write

    spec = drawing.spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    figure.write_html(path, include_plotlyjs=True, config=spec["config"])


def speed_figure(lines: Sequence[SpeedLine], setting: str) -> Drawing:
    """Figure 8, measured here: a bar for each variant, cut into forward, second run, backward; the first on top.

    setting: what was run where, in one line.
    """
    seconds = {
        one.name: (one.forward_seconds, one.recompute_seconds, one.backward_seconds - one.recompute_seconds)
        for one in lines
    }
    both = {one.name: f"{milliseconds(sum(seconds[one.name]))} ms" for one in lines}
    drawing = bar_chart(
        overhead_finding(lines),
        {
            part: dict(zip(seconds, (1000 * size for size in sizes)))
            for part, sizes in zip(_PARTS, zip(*seconds.values()))
        },
        "one layer, one microbatch",
        "ms",
        fills=list(_PARTS.values()),
        notes={one.name: both[one.name] + (f", {overhead_text(one.over)}" if one.over else "") for one in lines},
    )
    title = {**drawing.layout["title"], "subtitle": {"text": setting}}
    return replace(drawing, layout={**drawing.layout, "title": title})


def overhead_finding(lines: Sequence[SpeedLine]) -> str:
    """The figure's title: what recomputing everything costs here, and what recomputing the core does."""
    by_mode = {(line.recompute, line.sequence_parallel): line for line in lines}
    full, ours = by_mode[("full", False)], by_mode[("selective", True)]
    return f"Full recomputation costs {_cost(full)}, selective with sequence parallelism {_cost(ours)}"


def _cost(line: SpeedLine) -> str:
    if line.over is None:
        return "nothing"
    return f"{100 * line.over.value:+.0f}%" if line.over.is_real else f"less than {math.ceil(100 * line.over.within)}%"
