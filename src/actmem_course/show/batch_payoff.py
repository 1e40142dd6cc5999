"""When the memory that recomputation frees pays for it, as a larger microbatch."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from actmem.config import ModelShape
from actmem.formulas.batch import batch_factor, break_even, throughput
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, INK, VERMILION

#: Values of φ along the axis, in percent.
SHARES = tuple(range(0, 101, 2))
LINES = (
    ("selective", "selective", BLUE, "solid", "circle"),
    ("paper-full", "full, run to its end", VERMILION, "dash", "diamond"),
)


def batch_payoff(shape: ModelShape, fixed_percent: int) -> Drawing:
    """Throughput over φ, both modes in the memory that one sequence needs without recomputation.

    Full recomputation runs to its end, as the paper's baseline does.
    """
    traces: list[dict[str, Any]] = []
    for mode, name, colour, dash, symbol in LINES:
        traces += [
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{name}, {float(batch_factor(shape, mode)):.1f} times the microbatch",
                "x": list(SHARES),
                "y": [float(throughput(shape, mode, Fraction(share, 100))) for share in SHARES],
                "line": {"color": colour, "width": 3, "dash": dash},
                "hovertemplate": f"<b>{name}</b>, φ = %{{x}}%: %{{y:.3f}} times<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{name} at this φ",
                "x": [fixed_percent],
                "y": [float(throughput(shape, mode, Fraction(fixed_percent, 100)))],
                "marker": {"color": colour, "size": 13, "symbol": symbol, "line": {"color": INK, "width": 1.5}},
                "hovertemplate": f"<b>{name}</b>, φ = %{{x}}%: %{{y:.3f}} times<extra></extra>",
                "showlegend": False,
            },
        ]
    even = {mode: float(100 * break_even(shape, mode)) for mode, *_ in LINES}
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "no recomputation",
            "x": [SHARES[0], SHARES[-1]],
            "y": [1, 1],
            "line": {"color": INK, "width": 1.5, "dash": "dot"},
            "hoverinfo": "skip",
        }
    )
    return Drawing(
        traces,
        {
            "title": {
                "text": f"A larger microbatch pays for selective recomputation above φ = {even['selective']:.2f}%,<br>for full recomputation, run to its end, above φ = {even['paper-full']:.0f}%"
            },
            "xaxis": {
                "title": {"text": "φ: fixed part of a step, percent of the work of its sequences"},
                "range": [-1, 101],
                "ticksuffix": "%",
            },
            "yaxis": {"title": {"text": "sequences a second, relative"}, "range": [0.7, 1.7]},
            "height": 430,
        },
        f"Lines of throughput over the fixed share φ: selective recomputation passes 1 at {even['selective']:.2f}%, full, run to its end, at "
        f"{even['paper-full']:.1f}%; at φ={fixed_percent}% they reach {traces[1]['y'][0]:.3f} and {traces[3]['y'][0]:.3f}.",
    )
