"""Chapter 7: what the paper's methods cost in time, the roofline that says why, and what a larger batch brings."""

from collections.abc import Sequence

from actmem.config import ModelShape, Parallel
from actmem.formulas.flops import (
    A100_BYTES_PER_SECOND,
    A100_FLOPS_PER_SECOND,
    Operation,
    forward_operations,
)
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing, chart, line, points, scale, words
from actmem_course.figures.style import BLUE, COMPARED, FILLS, INK, VERMILION
from actmem_course.figures.units import size_text, three_digits
from actmem_course.others import paper

_PASSES = {"forward": FILLS["forward"], "backward, with what it recomputes": FILLS["backward"]}
_A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
#: Kinds of operation: name, colour and marker of a point.
_KINDS = (
    ("core attention", VERMILION, "diamond"),
    ("linear", BLUE, "circle"),
    ("norms, GeLU, dropouts, sums", COMPARED, "square"),
)
_LEFT, _RIGHT = 0.2, 12_000.0
#: Operations whose FLOPs per byte differ by less than this factor have their names in one place.
_NEAR = 1.4


def table4_bars(count: int = len(paper.TABLE4)) -> Drawing:
    """Draw rows of the paper's table 4: milliseconds of one layer of the 22B model on 8 GPUs.

    Args:
        count: How many rows, from the top, have a bar; the rows below them have a question mark.
    """
    rows, shown = paper.TABLE4, list(paper.TABLE4)[:count]
    first, *_ = ends = [row.combined_ms for row in rows.values()]
    longer = {name: 100 * (rows[name].combined_ms / first - 1) for name in shown}
    finding = f"One layer takes {first} ms"
    if count == len(rows):
        full, both = longer["full recompute"], longer["selective + sequence parallel"]
        finding = f"Recomputing everything makes a layer {full:.0f}% slower,<br>both methods of the paper {both:.0f}%"
    times = zip(*((row.forward_ms, row.backward_ms) if name in shown else (None, None) for name, row in rows.items()))
    return bar_chart(
        finding,
        {name: dict(zip(rows, values)) for name, values in zip(_PASSES, times)},
        "one layer of the 22B model on 8 GPUs",
        "ms",
        fills=list(_PASSES.values()),
        notes=dict.fromkeys(rows, "?")
        | {name: f"{percent:+.0f}%" if percent else f"{first} ms" for name, percent in longer.items()},
        room_for=max(ends),
    )


def roofline(shape: ModelShape, parallel: Parallel) -> Drawing:
    """Draw a roofline: the highest rate (FLOPs per second) of each operation over its FLOPs per byte, both logarithmic.

    The sloped part of the roof is an A100's memory bandwidth, the flat part its peak rate of matmuls.

    Args:
        shape: The layer's sizes.
        parallel: How ranks share the layer.
    """
    a, b, h, s = shape.letters()
    operations = forward_operations(shape, parallel)
    ridge = A100_FLOPS_PER_SECOND / A100_BYTES_PER_SECOND
    slow = [o for o in operations if o.bound_by_memory(*_A100)]
    core = [float(o.intensity) for o in operations if o.core]
    rates = [_LEFT * A100_BYTES_PER_SECOND / 1e12, A100_FLOPS_PER_SECOND / 1e12, A100_FLOPS_PER_SECOND / 1e12]
    device = f"A100: {A100_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, {A100_BYTES_PER_SECOND / 1e9:,.0f} GB/s"
    log = {"type": "log", "dtick": 1, "exponentformat": "none"}
    return chart(
        f"{len(slow)} of {len(operations)} operations are memory-bound; in the core attention<br>"
        f"{min(core):.1f} to {max(core):.0f} FLOPs per byte; the ridge is at {ridge:.0f}",
        [
            line(device, [_LEFT, ridge, _RIGHT], rates, INK, width=2),
            *(
                points(
                    name, [float(o.intensity) for o in group], list(map(_reached, group)),
                    colour, "<b>%{customdata[0]}</b>: %{x:.1f} FLOPs per byte<br>%{customdata[1]}", symbol, 12, 1,
                    customdata=[[o.name, _bound(o)] for o in group],
                )
                # The core last, on top of the others.
                for (name, colour, symbol), group in [*zip(_KINDS, _grouped(operations))][::-1]
            ),
            _names(operations),
        ],
        f"Roofline at s={s}, b={b}, h={h}, a={a}, t={parallel.tensor_parallel_size}, FLOPs per byte: "
        + ", ".join(f"{o.name} {three_digits(float(o.intensity))}" for o in operations)
        + f"; the ridge is at {ridge:.0f}.",
        xaxis=scale("FLOPs for each byte moved", -0.7, 4.05, **log),
        yaxis=scale("TFLOP/s at most", -0.9, 3.3, separatethousands=True, **log),
        height=520,
    )  # fmt: skip


def _names(operations: Sequence[Operation]) -> dict:
    """Return the markers' names.

    Linears share one place, and so do other operations that lie close together. Neighbours have their names on opposite
    sides of the line.
    """
    core, linears, rest = _grouped(sorted(operations, key=lambda o: o.intensity))
    groups: list[list[Operation]] = []
    for o in sorted(core + rest, key=lambda o: o.intensity):
        if groups and o.intensity < _NEAR * groups[-1][0].intensity:
            groups[-1].append(o)
        else:
            groups.append([o])
    groups.append(linears)
    last = [group[-1] for group in groups]
    below = [place % 2 == 0 and o.bound_by_memory(*_A100) for place, o in enumerate(last)]
    # Four lines above the roof would leave the frame.
    places = ["bottom right" if is_below else "top left" for is_below in below[:-1]] + ["bottom left"]
    return words(
        [float(o.intensity) for o in last],
        list(map(_reached, last)),
        ["<br>".join(o.name for o in group) for group in groups],
        12,
        textposition=places,
        meta="names",  # letters on a narrow page
        mode="markers+text",
        marker={"size": 14, "opacity": 0},  # keeps the words off the markers
    )


def _reached(o: Operation) -> float:
    """Return the TFLOPs a second that an operation reaches at most."""
    return o.flops / float(o.least_seconds(*_A100)) / 1e12


def _grouped(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return the operations of each kind in _KINDS, in that order."""
    kind = [0 if o.core else 1 if o.matmul else 2 for o in operations]
    return [[o for o, own in zip(operations, kind) if own == number] for number in range(len(_KINDS))]


def _bound(o: Operation) -> str:
    bound = "memory" if o.bound_by_memory(*_A100) else "the matmuls' rate"
    least = f"{1e6 * float(o.least_seconds(*_A100)):,.0f} µs"
    return f"{o.flops / 1e9:,.2f} GFLOP, {size_text(o.bytes)} moved; at least {least}, bound by {bound}"
