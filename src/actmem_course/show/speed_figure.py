"""Figure 8, measured here: a bar for each variant, cut into forward, second run, backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from actmem_course.results import SpeedLine
from actmem_course.show.drawing import Drawing
from actmem_course.show.speed_table import milliseconds, overhead_text
from actmem_course.show.style import BLUE, ORANGE, VERMILION, Fill

FORWARD, AGAIN, BACKWARD = Fill(BLUE, "", "#FFFFFF"), Fill(VERMILION, "/"), Fill(ORANGE, "x")


def speed_figure(lines: Sequence[SpeedLine], setting: str) -> Drawing:
    """Draw the lines of a speed measurement, the first on top.

    setting: what was run where, in one line.
    """
    names = [line.name for line in lines]
    parts = (
        ("forward", FORWARD, [line.forward_seconds for line in lines]),
        ("forward again, in backward", AGAIN, [line.recompute_seconds for line in lines]),
        ("backward", BACKWARD, [line.backward_seconds - line.recompute_seconds for line in lines]),
    )
    traces: list[dict[str, object]] = [
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
        "title": {"text": overhead_finding(lines), "subtitle": {"text": setting}},
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "height": 180 + 42 * len(lines),
        "xaxis": {
            "title": {"text": "milliseconds of one layer, one microbatch"},
            "range": [0, 1.35 * max(ends, default=1)],
        },
        "yaxis": {"autorange": "reversed"},
    }
    alt = f"{overhead_finding(lines)}. " + "; ".join(f"{name}:{label}" for name, label in zip(names, labels)) + "."
    return Drawing(traces, layout, alt)


def overhead_finding(lines: Sequence[SpeedLine]) -> str:
    """The figure's title: what recomputing everything costs here, and what recomputing the core does."""
    by_mode = {(line.recompute, line.sequence_parallel): line for line in lines}
    full, ours = by_mode[("full", False)], by_mode[("selective", True)]
    return f"Full recomputation costs {_cost(full)}, selective with sequence parallelism {_cost(ours)}"


def _cost(line: SpeedLine) -> str:
    if line.over is None:
        return "nothing"
    return f"{100 * line.over.value:+.0f}%" if line.over.is_real else f"less than {math.ceil(100 * line.over.within)}%"


def _beside(line: SpeedLine) -> str:
    return f", {overhead_text(line.over)}" if line.over else ""


def write_page(drawing: Drawing, path: Path) -> None:
    """Write a drawing as one page that needs no network."""
    import plotly.graph_objects as go  # loaded only to write

    spec = drawing.spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    figure.write_html(path, include_plotlyjs=True, config=spec["config"])
