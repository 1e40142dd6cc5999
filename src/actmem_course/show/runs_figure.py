"""Runs that others published: printed peaks beside predicted ones, as a figure."""

from __future__ import annotations

from collections.abc import Sequence

from actmem_course.results import RunResult
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, INK, VERMILION

_MIB_IN_GIB = 1024


def runs_figure(results: Sequence[RunResult]) -> Drawing:
    """Predicted over printed, a point a run, on the line of equality; below, the differences in percent."""
    shown = [r for r in results if r.predicted_mib is not None and r.difference_percent is not None]
    x = [r.printed_mib / _MIB_IN_GIB for r in shown]
    y = [(r.predicted_mib or 0) / _MIB_IN_GIB for r in shown]
    off = [r.difference_percent or 0.0 for r in shown]
    top = 1.06 * max(x + y)
    worst = max(map(abs, off))
    reach = 1.15 * max([worst, *(r.limit_percent or 0 for r in shown)])
    hover = [
        f"{r.framework}, {r.setting}<br>printed {r.printed_mib:,.2f} MiB, predicted {r.predicted_mib:,.2f} MiB"
        f"<br>{r.difference_percent:+.3f}%, {r.moment}"
        for r in shown
    ]
    limit = next((r.limit_percent for r in shown if r.limit_percent), None)
    traces: list[dict] = [
        {"type": "scatter", "mode": "lines", "x": [0, top], "y": [0, top], "line": {"color": INK, "dash": "dot", "width": 1},
         "name": "predicted = printed", "hoverinfo": "skip"},
        {"type": "scatter", "mode": "markers", "x": x, "y": y, "name": "one run", "text": hover, "hoverinfo": "text",
         "marker": {"color": BLUE, "size": 12, "line": {"color": INK, "width": 1}}},
        {"type": "scatter", "mode": "markers", "x": x, "y": off, "xaxis": "x2", "yaxis": "y2", "text": hover, "hoverinfo": "text",
         "marker": {"color": BLUE, "size": 12, "line": {"color": INK, "width": 1}}, "showlegend": False},
    ]  # fmt: skip
    for side in (-1, 1) if limit else ():
        traces.append(
            {"type": "scatter", "mode": "lines", "x": [0, top], "y": [side * (limit or 0)] * 2, "xaxis": "x2", "yaxis": "y2",
             "line": {"color": VERMILION, "dash": "dash", "width": 2}, "name": f"limit {limit}%", "showlegend": side == 1,
             "hoverinfo": "skip"}
        )  # fmt: skip
    title = f"{len(shown)} runs of others, {min(x):.0f} to {max(x):.0f} GiB on a GPU:<br>no prediction is more than {worst:.2f}% off"
    axis = {"range": [0, top], "title": {"text": "peak that the run logged, GiB"}}
    return Drawing(
        traces,
        {
            "title": {"text": title},
            "height": 640,
            "xaxis": {"range": [0, top], "showticklabels": False},
            "yaxis": {"range": [0, top], "domain": [0.42, 1], "title": {"text": "predicted, GiB"}},
            "xaxis2": {**axis, "anchor": "y2"},
            "yaxis2": {
                "domain": [0, 0.32],
                "range": [-reach, reach],
                "title": {"text": "difference"},
                "ticksuffix": "%",
            },
        },
        f"Predicted over printed peak, {len(shown)} runs, all near the line of equality: "
        + "; ".join(f"{r.setting} {r.printed_mib:,.0f} MiB, {r.difference_percent:+.3f}%" for r in shown)
        + ".",
    )
