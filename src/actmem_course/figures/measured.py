"""What labs measured, as figures for a page of its own: speed, and published runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from actmem_course.figures.bar_chart import bar_chart
from actmem_course.figures.checks import Fold
from actmem_course.figures.marks import Drawing, chart, line, log_scale, points, scale
from actmem_course.figures.style import BLUE, FILLS, GREEN, INK, ORANGE, VERMILION, milliseconds
from actmem_course.figures.text import overhead_text, text_table
from actmem_course.others.allocator import UNSPLIT
from actmem_course.others.golden import WHY_APART, HereResult
from actmem_course.results import RunResult, SpeedLine

_PARTS = {
    "forward": FILLS["forward"],
    "forward again, in backward": FILLS["recomputed"],
    "backward": FILLS["backward"],
}
_MIB_IN_GIB = 1024


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


#: Points of runs_figure: a look for each framework.
_LOOKS = ((BLUE, "circle"), (ORANGE, "diamond"), (GREEN, "square"))


def runs_figure(results: Sequence[RunResult]) -> Drawing:
    """Runs that others published: predicted over printed, a point a run, on the line of equality; below, the differences.

    A look for each framework.  Limits are drawn where all runs have the same.
    """
    printed = [r.printed_mib / _MIB_IN_GIB for r in results]
    off = [abs(r.difference_percent) for r in results]
    low, top = min(printed) / 1.2, max(printed) * 1.2
    limits = {r.limit_percent for r in results}
    limit = limits.pop() if len(limits) == 1 else None
    reach = 1.15 * max([*off, limit or 0])
    below = {"xaxis": "x2", "yaxis": "y2"}
    traces = [line("predicted = logged", [low, top], [low, top], INK, None, "dot", 1)]
    for (colour, symbol), name in zip(_LOOKS, dict.fromkeys(r.framework for r in results)):
        own = [r for r in results if r.framework == name]
        said: dict[str, Any] = {
            "text": [
                f"{name}, {r.setting}<br>logged {r.printed_mib:,.2f} MiB, predicted {r.predicted_mib:,.2f} MiB"
                f"<br>{r.difference_percent:+.3f}%" + (f", {r.moment}" if r.moment else "")
                for r in own
            ],
            "hoverinfo": "text",
        }
        x, y = [r.printed_mib / _MIB_IN_GIB for r in own], [r.predicted_mib / _MIB_IN_GIB for r in own]
        percents = [r.difference_percent for r in own]
        look: dict[str, Any] = {"symbol": symbol, "size": 12 if len(results) < 40 else 9, "edge": 1, **said}
        traces += [
            points(f"{name}, {len(own)} runs", x, y, colour, **look),
            points("", x, percents, colour, showlegend=False, **(look | below)),
        ]
    for side in (-1, 1) if limit else ():
        ends = [side * limit] * 2 if limit else []
        traces.append(
            line(f"limit {limit}%", [low, top], ends, VERMILION, None, "dash", 2, showlegend=side == 1, **below)
        )
    half = f", half are within {_outwards(median(off))}%" if len({r.framework for r in results}) > 1 else ""
    ticks = [size for size in (1, 2, 5, 10, 20, 50, 100) if low < size < top]
    ends = [math.log10(low), math.log10(top)]
    farthest = sorted(results, key=lambda r: -abs(r.difference_percent))[:20]
    return chart(
        f"{len(results)} runs of others, {min(printed):.1f} to {max(printed):.1f} GiB on a GPU:"
        f"<br>no prediction is more than {_outwards(max(off))}% off{half}",
        traces,
        f"Predicted over logged peak, {len(results)} runs, all near the line of equality; the farthest: "
        + "; ".join(f"{r.setting} {r.printed_mib:,.0f} MiB, {r.difference_percent:+.3f}%" for r in farthest)
        + ".",
        height=640,
        xaxis=log_scale("", ticks, range=ends, showticklabels=False),
        yaxis=log_scale("predicted, GiB", ticks, range=ends, domain=[0.42, 1]),
        xaxis2=log_scale("peak that the run logged, GiB", ticks, range=ends, anchor="y2"),
        yaxis2=scale("difference", -reach, reach, domain=[0, 0.32], ticksuffix="%"),
    )


def here_fold(results: Sequence[HereResult]) -> Fold:
    """NVIDIA's tests: what a GPU logged beyond what it holds at rest and what one emulated rank counts, a model a line; the first in parts."""
    lines = []
    for r in results:
        more = ", full" if r.run.full_recompute else f", t = {r.run.t}" if r.run.t > 1 else ""
        name = f"{'' if r.run.has_embedding else 'last '}{r.run.chunks[0]} layers{more}"
        lines.append((name, r.logged_bytes, r.counted_bytes, f"{r.logged_bytes - r.counted_bytes:+,}"))
    far = max(math.ceil(1000 * abs(1 - r.counted_bytes / r.logged_bytes)) / 10 for r in results)
    first = results[0]
    unsplit = max(((r.apart.get(UNSPLIT, 0), r.run.t) for r in results), default=(0, 1))
    blocks = f"With t = {unsplit[1]}, {unsplit[0]:,} B are blocks larger than their tensors.\n" if unsplit[0] else ""
    parts = (f"{size:>+11,} B on the GPU  {line}: {WHY_APART[line]}" for line, size in first.apart.items())
    return Fold(
        f"{len(results)} models: a laptop's count is within {far:.1f}% of what a GPU logged",
        text_table(("model", "logged, B", "counted here, B", "apart"), lines, " rrr")
        + f"\n\nThe first line's {first.logged_bytes - first.counted_bytes:,} B of difference. A log has one number for each run; "
        + "how it splits into lines is our simulation of the run.\n"
        + blocks
        + "\n".join(parts),
    )


def _outwards(percent: float) -> str:
    """A bound with two digits, rounded up: what is 2.262% off is within 2.27%, not within 2.26%."""
    return f"{math.ceil(100 * percent) / 100:.2f}"
