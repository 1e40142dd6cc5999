"""Scaling: a table of slopes, and one figure with a panel for each size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from actmem_course.results import ScalingPoint, ScalingSlopes
from actmem_course.show.drawing import Drawing
from actmem_course.show.speed_table import milliseconds, plain_table
from actmem_course.show.style import BLUE, INK, VERMILION, size_text, three_digits

LETTERS = {"seq_length": "s", "hidden_size": "h", "tensor_parallel_size": "t", "num_microbatches": "n"}
NAMES = {
    "seq_length": "sequence length s",
    "hidden_size": "hidden size h",
    "tensor_parallel_size": "tensor-parallel size t",
    "num_microbatches": "microbatches n",
}

#: Ticks of the vertical axes: these powers of 2.
_POWERS = range(-6, 13)


def scaling_table(points: Sequence[ScalingPoint], slopes: Sequence[ScalingSlopes], title: str) -> Table:
    """A point a line, and below each axis its slopes."""
    table = plain_table(title)
    table.add_column("one layer", no_wrap=True)
    for name in ("ms", "quartiles", "GFLOP", "holds", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for slope in slopes:
        for point in points:
            if point.axis != slope.axis:
                continue
            quartiles = "–".join(map(milliseconds, point.quartiles))
            off = abs(point.measured_flops - point.predicted_flops) + abs(point.measured_bytes - point.predicted_bytes)
            table.add_row(
                f"{LETTERS[point.axis]} = {point.value}", milliseconds(point.seconds), Text(quartiles, style="dim"),
                three_digits(point.measured_flops / 1e9), size_text(point.measured_bytes), str(off),
                style="" if point.exact else "bold red",
            )  # fmt: skip
        table.add_row(
            f"~ {LETTERS[slope.axis]} to the", f"{slope.seconds:.2f}", Text(f"±{slope.spread:.2f}", style="dim"),
            f"{slope.flops:.2f}", f"{slope.bytes:.2f}", "", style="bold", end_section=True,
        )  # fmt: skip
    return table


def scaling_figure(points: Sequence[ScalingPoint], slopes: Sequence[ScalingSlopes], setting: str) -> Drawing:
    """A panel for each axis: seconds, FLOPs and bytes, each over its first point, on logarithmic axes."""
    traces, layout = [], {"height": 720, "title": {"text": slope_finding(slopes), "subtitle": {"text": setting}}}
    for number, slope in enumerate(slopes):
        own = [point for point in points if point.axis == slope.axis]
        suffix = str(number + 1) if number else ""
        traces += _panel(own, slope, suffix, first=number == 0)
        layout |= _axes(own, slope, suffix, number)
    return Drawing(traces, layout, alt_text(points, slopes))


def slope_finding(slopes: Sequence[ScalingSlopes]) -> str:
    """The title: how far the seconds' slopes are from the FLOPs'."""
    worst = max(slopes, key=lambda slope: abs(slope.seconds - slope.flops))
    return (
        f"The slope of time is within {abs(worst.seconds - worst.flops):.2f} of that of the FLOPs,<br>"
        f"furthest off in {NAMES[worst.axis]}: {worst.seconds:.2f} where the formula has {worst.flops:.2f}"
    )


def alt_text(points: Sequence[ScalingPoint], slopes: Sequence[ScalingSlopes]) -> str:
    """All slopes in one line."""
    each = (f"{NAMES[s.axis]}: time {s.seconds:.2f}, FLOPs {s.flops:.2f}, bytes {s.bytes:.2f}" for s in slopes)
    return "Slopes on logarithmic axes, measured time beside the formulas of FLOPs and bytes: " + "; ".join(each) + "."


def _panel(points: Sequence[ScalingPoint], slope: ScalingSlopes, suffix: str, first: bool) -> list[dict]:
    values = [point.value for point in points]
    base = points[0]
    lines = (
        ("FLOPs by formula", BLUE, "dash", [p.predicted_flops / base.predicted_flops for p in points], "lines", ""),
        (
            "bytes held, by formula and counted",
            VERMILION,
            "dot",
            [p.predicted_bytes / base.predicted_bytes for p in points],
            "lines+markers",
            "square-open",
        ),
        ("seconds, measured", INK, "solid", [p.seconds / base.seconds for p in points], "markers", "circle"),
    )
    traces = []
    for name, colour, dash, ys, mode, symbol in lines:
        trace = {
            "type": "scatter", "mode": mode, "x": values, "y": ys, "name": name, "legendgroup": name, "showlegend": first,
            "line": {"color": colour, "dash": dash, "width": 2}, "marker": {"color": colour, "size": 10, **({"symbol": symbol} if symbol else {})},
            "xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "hovertemplate": LETTERS[slope.axis] + " = %{x}: × %{y:.3~g}<extra>" + name + "</extra>",
        }  # fmt: skip
        traces.append(trace)
    seconds = traces[-1]
    seconds["error_y"] = {
        "type": "data", "symmetric": False, "array": [(p.quartiles[1] - p.seconds) / base.seconds for p in points],
        "arrayminus": [(p.seconds - p.quartiles[0]) / base.seconds for p in points], "color": INK,
    }  # fmt: skip
    return traces


def _axes(points: Sequence[ScalingPoint], slope: ScalingSlopes, suffix: str, number: int) -> dict:
    left, bottom = number % 2, 1 - number // 2
    values = [point.value for point in points]
    return {
        f"xaxis{suffix}": {
            "type": "log", "tickvals": values, "ticktext": [str(value) for value in values], "anchor": f"y{suffix}",
            "domain": [0.54 * left, 0.46 + 0.54 * left],
            "title": {"text": f"{NAMES[slope.axis]}; slope of time {slope.seconds:.2f}, FLOPs {slope.flops:.2f}, bytes {slope.bytes:.2f}", "font": {"size": 12}},
        },
        f"yaxis{suffix}": {
            "type": "log", "anchor": f"x{suffix}", "domain": [0.58 * bottom, 0.42 + 0.58 * bottom],
            "title": {"text": "× the first" if not left else ""},
            "tickvals": [2.0**n for n in _POWERS], "ticktext": [str(2**n) if n >= 0 else f"1/{2**-n}" for n in _POWERS],
        },
    }  # fmt: skip
