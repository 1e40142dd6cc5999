"""The roofline of one device, each operation of a layer on it, and the least time each takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actmem.config import ModelShape, Parallel
from actmem.formulas.roofline import (
    A100_BYTES_PER_SECOND,
    A100_FLOPS_PER_SECOND,
    Operation,
    forward_operations,
    least_seconds,
)
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import BLUE, CARD, INK, VERMILION, YELLOW, Fill, axis_end, size_text, three_digits

_A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
#: Kinds of operation: name, colour and marker of a point, fill of a bar.
_KINDS = (
    ("attention core", VERMILION, "diamond", Fill(VERMILION, "/")),
    ("linear", BLUE, "circle", Fill(BLUE, "", CARD)),
    ("all else", YELLOW, "square", Fill(YELLOW, ".")),
)
_LEFT, _RIGHT = 0.2, 12_000.0


def roofline(shape: ModelShape, parallel: Parallel) -> Drawing:
    """FLOPs a second that each operation can reach at most, over its FLOPs per byte; both logarithmic.

    The slope is the memory's bandwidth, the flat part the highest rate of matrix products.
    """
    operations = forward_operations(shape, parallel)
    ridge = A100_FLOPS_PER_SECOND / A100_BYTES_PER_SECOND
    slow = [o for o in operations if o.bound_by_memory(*_A100)]
    points = [
        _points(name, colour, symbol, group) for (name, colour, symbol, _), group in zip(_KINDS, _grouped(operations))
    ]
    roof = {
        "type": "scatter",
        "mode": "lines",
        "name": f"A100: {A100_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, {A100_BYTES_PER_SECOND / 1e9:,.0f} GB/s",
        "x": [_LEFT, ridge, _RIGHT],
        "y": [_LEFT * A100_BYTES_PER_SECOND / 1e12, A100_FLOPS_PER_SECOND / 1e12, A100_FLOPS_PER_SECOND / 1e12],
        "line": {"color": INK, "width": 2},
        "hoverinfo": "skip",
    }
    core = [float(o.intensity) for o in operations if o.core]
    return Drawing(
        [roof, *points],
        {
            "title": {
                "text": f"{len(slow)} of {len(operations)} operations wait for memory; in the attention core<br>{min(core):.1f} to {max(core):.0f} FLOPs per byte, where {ridge:.0f} fill the device"
            },
            "xaxis": {
                "type": "log",
                "title": {"text": "FLOPs for each byte moved"},
                "range": [-0.7, 4.05],
                "dtick": 1,
                "exponentformat": "none",
            },
            "yaxis": {
                "type": "log",
                "title": {"text": "TFLOP/s at most"},
                "range": [-0.5, 2.8],
                "dtick": 1,
                "exponentformat": "none",
            },
            "height": 460,
        },
        f"Roofline at {_sizes(shape, parallel)}, FLOPs per byte: "
        + ", ".join(f"{o.name} {three_digits(float(o.intensity))}" for o in operations)
        + f"; the ridge is at {ridge:.0f}.",
    )


def least_times(shape: ModelShape, parallel: Parallel) -> Drawing:
    """The same operations as bars of the least time on an A100, in order of the forward pass."""
    operations = forward_operations(shape, parallel)
    whole = least_seconds(operations, *_A100)
    core = [o for o in operations if o.core]
    time_share = float(least_seconds(core, *_A100) / whole)
    flop_share = sum(o.flops for o in core if o.product) / sum(o.flops for o in operations if o.product)
    names = [o.name for o in operations]
    traces: list[dict[str, Any]] = []
    for (name, _, _, fill), group in zip(_KINDS, _grouped(operations)):
        times = [1000 * float(o.least_seconds(*_A100)) for o in group]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [o.name for o in group],
                "x": times,
                "text": [three_digits(time) for time in times],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": fill.marker(),
                "customdata": [_hover(o) for o in group],
                "hovertemplate": "<b>%{y}</b>: %{x:.3f} ms<br>%{customdata}<extra></extra>",
            }
        )
    longest = max(max(trace["x"]) for trace in traces)
    axis = Axis("least time on one A100, milliseconds", axis_end(1.12 * longest))
    return Drawing(
        traces,
        {
            "title": {
                "text": f"The attention core has {flop_share:.0%} of the products' FLOPs<br>and {time_share:.0%} of the forward pass's least time"
            },
            "xaxis": {"title": {"text": axis.title}, "range": [0, axis.end]},
            "yaxis": {"categoryorder": "array", "categoryarray": names[::-1]},
            "barmode": "overlay",
            "height": 520,
            "bargap": 0.2,
        },
        f"Bars of least time at {_sizes(shape, parallel)}: the forward pass takes at least {1000 * float(whole):.3f} ms, of which the "
        f"attention core {time_share:.1%} with {flop_share:.1%} of the products' FLOPs.",
        axis,
    )


def _grouped(operations: Sequence[Operation]) -> list[list[Operation]]:
    return [
        [o for o in operations if o.core],
        [o for o in operations if o.product and not o.core],
        [o for o in operations if not o.product and not o.core],
    ]


def _points(name: str, colour: str, symbol: str, group: Sequence[Operation]) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [float(o.intensity) for o in group],
        "y": [o.flops / float(o.least_seconds(*_A100)) / 1e12 for o in group],
        "customdata": [[o.name, _hover(o)] for o in group],
        "marker": {"color": colour, "size": 12, "symbol": symbol, "line": {"color": INK, "width": 1}},
        "hovertemplate": "<b>%{customdata[0]}</b>: %{x:.1f} FLOPs per byte<br>%{customdata[1]}<extra></extra>",
    }


def _hover(o: Operation) -> str:
    bound = "memory" if o.bound_by_memory(*_A100) else "the products' rate"
    return f"{o.flops / 1e9:,.2f} GFLOP, {size_text(o.bytes)} moved; bound by {bound}"


def _sizes(shape: ModelShape, parallel: Parallel) -> str:
    a, b, h, s = shape.letters()
    return f"s={s}, b={b}, h={h}, a={a}, t={parallel.tensor_parallel_size}"
