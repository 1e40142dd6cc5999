"""What a slider changed can be seen: the axis stays as long as it can, and marks show where the bars ended before."""

from __future__ import annotations

from dataclasses import replace

from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import INK

#: Below this share of a kept axis bars would be too short to read.
_SHORTEST = 1 / 6
BEFORE = "before the last move"


def after(previous: Drawing, drawing: Drawing) -> Drawing:
    """``drawing`` as it looks when it takes the place of ``previous``; unchanged if either names no axis."""
    if previous.axis is None or drawing.axis is None:
        return drawing
    need, kept = drawing.axis.end * drawing.axis.unit, previous.axis.end * previous.axis.unit
    axis = previous.axis if _SHORTEST * kept <= need <= kept else drawing.axis
    drawn = _on_axis(drawing, axis)
    ends = _ends(previous)
    if ends == _ends(drawn):
        return drawn
    return replace(drawn, traces=[*drawn.traces, _marks(ends, axis)])


def _on_axis(drawing: Drawing, axis: Axis) -> Drawing:
    assert drawing.axis is not None
    factor, along = drawing.axis.unit / axis.unit, axis.along
    traces = [
        {**trace, along: [value if value is None else value * factor for value in trace[along]]}
        for trace in drawing.traces
    ]
    shown = {**drawing.layout[f"{along}axis"], "title": {"text": axis.title}, "range": [0, axis.end]}
    return replace(drawing, traces=traces, layout={**drawing.layout, f"{along}axis": shown}, axis=axis)


def _ends(drawing: Drawing) -> dict[str, float]:
    """Where each bar ends, in the axis's smallest unit.  None for bars side by side, which show their numbers."""
    assert drawing.axis is not None
    if drawing.layout.get("barmode") == "group":
        return {}
    along, names = drawing.axis.along, "y" if drawing.axis.along == "x" else "x"
    found: dict[str, float] = {}
    for trace in drawing.traces:
        if trace["type"] == "bar":
            for name, value in zip(trace[names], trace[along]):
                if value is not None:
                    found[name] = found.get(name, 0) + value * drawing.axis.unit
    return found


def _marks(ends: dict[str, float], axis: Axis) -> dict:
    names = "y" if axis.along == "x" else "x"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": BEFORE,
        axis.along: [end / axis.unit for end in ends.values()],
        names: list(ends),
        "marker": {
            "symbol": "line-ns" if axis.along == "x" else "line-ew",
            "size": 30,
            "line": {"width": 3, "color": INK},
            "opacity": 0.6,
        },
        "hoverinfo": "skip",
    }
