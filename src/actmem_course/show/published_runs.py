"""Runs that others published: printed peaks beside predicted ones, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from actmem_course.results import RunResult, StepTimeResult
from actmem_course.show.drawing import Drawing
from actmem_course.show.speed_table import plain_table
from actmem_course.show.style import BLUE, INK, VERMILION

_MIB_IN_GIB = 1024


def runs_table(results: Sequence[RunResult], title: str = "Peak of one GPU, MiB") -> Table:
    """A run a line: its setting, the printed peak, the predicted one, the difference in MiB and percent."""
    table = plain_table(title)
    table.add_column("run", no_wrap=True)
    for name in ("printed", "predicted", "diff.", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        if r.predicted_mib is None or r.difference_percent is None:
            table.add_row(r.setting, f"{r.printed_mib:,.2f}", "-", "", "")
            continue
        table.add_row(
            r.setting,
            f"{r.printed_mib:,.2f}",
            f"{r.predicted_mib:,.2f}",
            f"{r.predicted_mib - r.printed_mib:+,.2f}",
            f"{r.difference_percent:+.3f}",
            style="bold red" if r.within_limit is False else "",
        )
    return table


def reserved_table(results: Sequence[RunResult]) -> Table:
    """Runs that logged what their allocator reserved, in GiB: printed, what we count of it, and why no more."""
    table = plain_table("torchtitan: GiB that the allocator reserved, and what we count of them")
    table.add_column("run", overflow="fold")
    for name in ("printed", "counted", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        share = "" if r.predicted_mib is None else f"{100 * r.predicted_mib / r.printed_mib:.0f}%"
        counted = "-" if r.predicted_mib is None else f"{r.predicted_mib / _MIB_IN_GIB:.1f}"
        table.add_row(f"{r.setting}: {r.note}", f"{r.printed_mib / _MIB_IN_GIB:.1f}", counted, share)
    return table


def times_table(results: Sequence[StepTimeResult]) -> Table:
    """Published step times beside the planner's."""
    table = plain_table("Step times: printed, and by the planner's time model")
    table.add_column("run", overflow="fold")
    for name in ("unit", "printed", "predicted", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        cells = (r.unit, f"{r.printed:,.2f}", f"{r.predicted:,.2f}", f"{r.difference_percent:+.1f}")
        table.add_row(f"{r.source}: {r.setting}", *cells)
    return table


def parts_table(results: Sequence[RunResult]) -> Table:
    """What the predicted peak of each run is made of, in MiB, and when it is reached."""
    parts = list(dict.fromkeys(part for r in results for part in r.parts_bytes or {}))
    table = plain_table("What the predicted peak is made of, MiB")
    table.add_column("part", no_wrap=True)
    for name in ("least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share of the peak", justify="right", no_wrap=True)
    shown = [(r.predicted_mib, r.parts_bytes or {}) for r in results if r.predicted_mib is not None]
    for part in parts:
        sizes = [of_run.get(part, 0) / 2**20 for _, of_run in shown]
        shares = [100 * size / peak for size, (peak, _) in zip(sizes, shown)]
        table.add_row(part, f"{min(sizes):,.1f}", f"{max(sizes):,.1f}", f"{min(shares):.1f} – {max(shares):.1f}%")
    return table


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
