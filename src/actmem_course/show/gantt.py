"""A schedule as a Gantt chart, and below it what each rank holds, on the same time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from actmem.formulas.schedule import Action
from actmem.formulas.timeline import Span
from actmem_course.show.style import (
    BLUE,
    CARD,
    GREEN,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    YELLOW,
    Fill,
    axis_unit,
    size_text,
    three_digits,
)

#: Fills of passes by kind and chunk; further chunks start over.
_FILLS = {
    "F": (Fill(BLUE, "", CARD), Fill(SKY, ""), Fill("#CFE8F7", ""), Fill("#8AA4B8", "")),
    "B": (Fill(ORANGE, "/"), Fill(YELLOW, "/"), Fill("#FFF6BF", "/"), Fill("#CDB987", "/")),
    "W": (Fill(GREEN, "."), Fill("#A6DCC9", "."), Fill("#D8F0E8", "."), Fill("#8FAFA3", ".")),
}
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
#: With more passes than this their numbers don't fit; the hover text has them.
_MOST_LABELS = 170
_ROW, _CURVE, _GAP, _FOOT, _HEAD = 30, 56, 34, 104, 70


def gantt(
    spans: Sequence[Span],
    curves: Sequence[Sequence[tuple[int, int]]],
    limit: tuple[str, int] | None = None,
    fill_of: Callable[[Action], tuple[str, Fill]] | None = None,
    top: int = 0,
    now: int | None = None,
) -> tuple[list[dict], dict]:
    """Traces and layout, without a title.

    curves: for each rank steps (time, bytes) as ``timeline.memory_curve`` gives them; where several tensor-parallel ranks
    share the passes of a pipeline rank, there are more curves than ranks in the chart.  limit: a
    dashed line above each curve's foot, its name and bytes.  fill_of: name and fill of an action's
    bar, to show something other than kind and chunk.  top: bytes that fit into every curve's height, so that it
    stays the same while a slider moves.  now: passes and bytes up to this time only, on the axes of the whole step.
    """
    ranks, end = 1 + max(span.rank for span in spans), max(span.end for span in spans)
    peaks = [max(size for _, size in curve) for curve in curves]
    until = end if now is None else now
    so_far = [[(time, size) for time, size in curve if time <= until] for curve in curves]
    named = peaks if now is None else [curve[-1][1] for curve in so_far]
    # All curves share one pair of axes, each with a baseline of its own: axes take most of the time to draw.
    step = 1.2 * max([*peaks, limit[1] if limit else 0, top])
    unit, unit_name = axis_unit(max(peaks))
    feet = [-curve * step for curve in range(len(curves))]
    height = _HEAD + _ROW * ranks + _GAP + _CURVE * len(curves) + _FOOT
    inside = height - _HEAD - _FOOT
    layout: dict = {
        "barmode": "overlay",
        "bargap": 0.12,
        "height": height,
        "margin": {"t": _HEAD, "b": _FOOT, "l": 84},
        "uniformtext": {"mode": "hide", "minsize": 9},
        "xaxis": {"range": [0, end], "anchor": "y", "showticklabels": False, "ticks": "", "showgrid": False},
        "xaxis2": {"range": [0, end], "anchor": "y2", "title": {"text": "time, in forward passes of one chunk"}},
        "yaxis": {
            "domain": [1 - _ROW * ranks / inside, 1], "range": [ranks - 0.5, -0.5], "showgrid": False, "anchor": "x",
            "tickvals": list(range(ranks)), "ticktext": [f"rank {rank}" for rank in range(ranks)],
        },
        "yaxis2": {
            "domain": [0, _CURVE * len(curves) / inside], "range": [feet[-1], 0.98 * step], "showgrid": False, "anchor": "x2",
            "tickvals": [foot + 0.45 * step for foot in feet], "tickfont": {"size": 12},
            "ticktext": [f"rank {rank}<br>{three_digits(peak / unit)} {unit_name}" for rank, peak in enumerate(named)],
        },
    }  # fmt: skip
    traces = _bars(spans, fill_of or _by_kind(spans), until) + [_areas(so_far, feet, until)]
    if limit:
        traces.append(_limits(*limit, feet, end))
    return traces, layout


def _by_kind(spans: Sequence[Span]) -> Callable[[Action], tuple[str, Fill]]:
    chunks = 1 + max(span.action.chunk for span in spans)

    def fill_of(action: Action) -> tuple[str, Fill]:
        name = _NAMES[action.kind] + (f", chunk {action.chunk}" if chunks > 1 else "")
        return name, _FILLS[action.kind][action.chunk % 4]

    return fill_of


def _bars(spans: Sequence[Span], fill_of: Callable[[Action], tuple[str, Fill]], until: int) -> list[dict]:
    """What has begun before ``until``, cut there.  Every kind of pass has its place in the legend from the start."""
    groups: dict[str, tuple[Fill, list[Span]]] = {}
    for span in spans:
        name, fill = fill_of(span.action)
        group = groups.setdefault(name, (fill, []))[1]
        if span.start < until:
            group.append(replace(span, end=min(span.end, until)))
    labels = len(spans) <= _MOST_LABELS
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [span.rank for span in group],
            "x": [span.end - span.start for span in group],
            "base": [span.start for span in group],
            "marker": {**fill.marker(), "line": {"color": INK, "width": 0.7}},
            "customdata": [f"{span.action}, from {span.start} to {span.end}" for span in group],
            "hovertemplate": f"<b>rank %{{y}}</b>: %{{customdata}}<br>{name}<extra></extra>",
            **(
                {
                    "text": [str(span.action.microbatch) for span in group],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                    "textangle": 0,
                    "insidetextfont": {"color": fill.text, "size": 12},
                }
                if labels
                else {}
            ),
        }
        for name, (fill, group) in sorted(groups.items(), key=lambda item: _order(item[0]))
    ]


def _order(name: str) -> tuple[bool, bool, str]:
    return name.startswith(_NAMES["W"]), name.startswith(_NAMES["B"]), name


def _areas(curves: Sequence[Sequence[tuple[int, int]]], feet: Sequence[float], end: int) -> dict:
    """One trace of all curves: outlines that close along their feet, with gaps between them."""
    x: list[int | None] = []
    y: list[float | None] = []
    about: list[list] = []
    for rank, (curve, foot) in enumerate(zip(curves, feet)):
        steps = [*curve, (end, curve[-1][1])]
        x += [0, *(time for time, _ in steps), end, 0, None]
        y += [foot, *(foot + size for _, size in steps), foot, foot, None]
        about += [[rank, 0, ""], *([rank, size, size_text(size)] for _, size in steps), *[[rank, 0, ""]] * 3]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "kept for backward",
        "x": x,
        "y": y,
        "customdata": about,
        "line": {"shape": "hv", "color": GREEN, "width": 2},
        "fill": "toself",
        "hoveron": "points",
        "hovertemplate": "<b>rank %{customdata[0]}</b> from time %{x}: %{customdata[1]:,} B, %{customdata[2]}<extra></extra>",
        "xaxis": "x2",
        "yaxis": "y2",
    }


def _limits(name: str, size: int, feet: Sequence[float], end: int) -> dict:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name}, {size_text(size)}",
        "x": [0, end, None] * len(feet),
        "y": [level for foot in feet for level in (foot + size, foot + size, None)],
        "line": {"color": VERMILION, "width": 2, "dash": "dash"},
        "hovertemplate": f"{name}: {size:,} B = {size_text(size)}<extra></extra>",
        "xaxis": "x2",
        "yaxis": "y2",
    }
