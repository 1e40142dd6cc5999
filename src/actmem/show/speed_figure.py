"""Figure 8 from one's own measurement: a bar for each variant, cut into forward, second run, backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from actmem.show.drawing import Drawing
from actmem.show.speed_table import milliseconds, overhead_text
from actmem.show.style import BLUE, ORANGE, VERMILION, Fill

FORWARD, AGAIN, BACKWARD = Fill(BLUE, "", "#FFFFFF"), Fill(VERMILION, "/"), Fill(ORANGE, "x")


def speed_figure(lines: Sequence, setting: str) -> Drawing:
    """Draw the lines of a speed measurement, the first on top.

    lines: objects with the fields of lab.speed.Line.  setting: what was run where, in one line.
    """
    names = [line.name for line in lines]
    parts = (
        ("forward", FORWARD, [line.forward_seconds for line in lines]),
        ("forward again, in backward", AGAIN, [line.recompute_seconds for line in lines]),
        ("backward", BACKWARD, [line.backward_seconds - line.recompute_seconds for line in lines]),
    )
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names, "x": [1000 * value for value in seconds],
            "marker": fill.marker(), "hovertemplate": "%{y}<br>" + name + ": %{x:.3~g} ms<extra></extra>",
        }
        for name, fill, seconds in parts
    ]  # fmt: skip
    ends = [1000 * (line.forward_seconds + line.backward_seconds) for line in lines]
    labels = [f" {milliseconds(end / 1000)} ms{_beside(line)}" for end, line in zip(ends, lines)]
    traces.append(
        {
            "type": "scatter", "mode": "text", "y": names, "x": ends, "text": labels, "textposition": "middle right",
            "hoverinfo": "skip", "showlegend": False, "cliponaxis": False,
        }
    )  # fmt: skip
    layout = {
        "title": {"text": finding(lines), "subtitle": {"text": setting}},
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "height": 180 + 42 * len(lines),
        "xaxis": {"title": {"text": "milliseconds of one layer, one microbatch"}, "range": [0, 1.35 * max(ends, default=1)]},
        "yaxis": {"autorange": "reversed"},
    }
    alt = f"{finding(lines)}. " + "; ".join(f"{name}:{label}" for name, label in zip(names, labels)) + "."
    return Drawing(traces, layout, alt)


def finding(lines: Sequence) -> str:
    """The figure's title: what recomputing everything costs here, and what recomputing the core does."""
    by_mode = {(line.recompute, line.sequence_parallel): line for line in lines}
    full, ours = by_mode[("full", False)], by_mode[("selective", True)]
    return f"Full recomputation costs {_cost(full)}, selective with sequence parallelism {_cost(ours)}"


def _cost(line) -> str:
    if line.is_real:
        return f"{100 * line.overhead:+.0f}%"
    return f"less than {math.ceil(100 * max(line.noise, (line.overhead_high - line.overhead_low) / 2))}%"


def _beside(line) -> str:
    if line.overhead is None:
        return ""
    return f", {overhead_text(line.overhead, line.overhead_low, line.overhead_high, line.is_real, line.noise)}"


def write_page(drawing: Drawing, path: Path) -> None:
    """Write a drawing as one page that needs no network."""
    import plotly.graph_objects as go  # loaded only to write

    spec = drawing.spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    figure.write_html(path, include_plotlyjs=True, config=spec["config"])
