"""What labs measured, as figures for a page of its own: speed, and published runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmem_course.others.nanotron import NanotronRun
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import Drawing, chart, line, log_scale, points, scale
from actmem_course.show.style import BLUE, INK, PAINT, milliseconds
from actmem_course.show.text import overhead_text

_PARTS = {"forward": PAINT["blue"], "forward again, in backward": PAINT["red"], "backward": PAINT["orange"]}
_MIB_IN_GIB = 1024


def write_page(drawing: Drawing, path: Path) -> None:
    """Write a drawing as one page that needs no network."""
    import plotly.graph_objects as go  # loaded only to write

    spec = drawing.spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    figure.write_html(path, include_plotlyjs=True, config=spec["config"])


def speed_figure(rows: Sequence[Mapping[str, Any]], setting: str) -> Drawing:
    """Figure 8, measured here: a bar for each variant, in parts: forward, recomputation, backward; the first on top.

    Args:
        rows: of labs/measure_speed.py.
        setting: what was run where, in one line.
    """
    seconds = {
        row["name"]: (
            row["forward_seconds"],
            row["recompute_seconds"],
            row["backward_seconds"] - row["recompute_seconds"],
        )
        for row in rows
    }
    notes = {row["name"]: f"{milliseconds(sum(seconds[row['name']]))} ms" for row in rows}
    for row in rows:
        if row["over"]:
            notes[row["name"]] += f", {overhead_text(row['over'])}"
    drawing = bar_chart(
        overhead_finding(rows),
        {
            part: dict(zip(seconds, (1000 * size for size in sizes)))
            for part, sizes in zip(_PARTS, zip(*seconds.values()))
        },
        "one layer, one microbatch",
        "ms",
        fills=list(_PARTS.values()),
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


def runs_figure(runs: Sequence[NanotronRun]) -> Drawing:
    """Runs that others logged: predicted over logged, a point a run, on the line of equality; below, the differences."""
    logged = [run.logged_mib / _MIB_IN_GIB for run in runs]
    predicted = [run.predicted_mib / _MIB_IN_GIB for run in runs]
    percents = [run.difference_percent for run in runs]
    farthest = max(map(abs, percents))
    low, top = min(logged) / 1.2, max(logged) * 1.2
    look: dict[str, Any] = {
        "symbol": "circle", "size": 12, "edge": 1, "hoverinfo": "text",
        "text": [
            f"{run.setting}<br>logged {run.logged_mib:,.2f} MiB, predicted {run.predicted_mib:,.2f} MiB"
            f"<br>{run.difference_percent:+.3f}%, {run.bill.moment}"
            for run in runs
        ],
    }  # fmt: skip
    ticks = [size for size in (1, 2, 5, 10, 20, 50, 100) if low < size < top]
    ends = [math.log10(low), math.log10(top)]
    return chart(
        f"{len(runs)} runs of others, {min(logged):.1f} to {max(logged):.1f} GiB on a GPU:"
        f"<br>no prediction is more than {_outwards(farthest)}% off",
        [
            line("predicted = logged", [low, top], [low, top], INK, None, "dot", 1),
            points(f"nanotron, {len(runs)} runs", logged, predicted, BLUE, **look),
            points("", logged, percents, BLUE, showlegend=False, xaxis="x2", yaxis="y2", **look),
        ],
        f"Predicted over logged peak, {len(runs)} runs, all near the line of equality: "
        + "; ".join(f"{run.setting} {run.logged_mib:,.0f} MiB, {run.difference_percent:+.3f}%" for run in runs)
        + ".",
        height=640,
        xaxis=log_scale("", ticks, range=ends, showticklabels=False),
        yaxis=log_scale("predicted, GiB", ticks, range=ends, domain=[0.42, 1]),
        xaxis2=log_scale("peak that the run logged, GiB", ticks, range=ends, anchor="y2"),
        yaxis2=scale("difference", -1.15 * farthest, 1.15 * farthest, domain=[0, 0.32], ticksuffix="%"),
    )


def _outwards(percent: float) -> str:
    """A bound with two digits, rounded up: what is 2.262% off is within 2.27%, not within 2.26%."""
    return f"{math.ceil(100 * percent) / 100:.2f}"
