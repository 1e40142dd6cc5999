"""How much each way to recompute adds, as the paper prints it, by its text, and as little as is needed."""

from __future__ import annotations

from fractions import Fraction

from actmem.config import ModelShape
from actmem.formulas.flops import eq9, layer_overhead
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import VERMILION, YELLOW, Fill, axis_end

_PAPER, _OURS = Fill("#BBBBBB", "x"), Fill(VERMILION, "/")
LESS = Fill(YELLOW, ".")


def added_flops(shape: ModelShape) -> Drawing:
    """Percent of a layer's FLOPs: selective in three counts, full in two.

    The first bar is equation 9, 1 + s/6h, which is equation 8 over 7 as the paper rounds it.
    """
    bars = (
        ("selective, eq. 9", eq9(shape) - 1, _PAPER, "s/6h: three passes of the core"),
        (
            "selective, by the text",
            layer_overhead(shape, "paper-selective"),
            _OURS,
            "the core once more: 4s/(72h + 12s)",
        ),
        ("selective, stopped", layer_overhead(shape, "selective"), LESS, "QKᵀ once more: 2s/(72h + 12s)"),
        ("full, to its end", layer_overhead(shape, "paper-full"), _OURS, "the forward pass once more: 1/3"),
        ("full, stopped", layer_overhead(shape, "full"), LESS, "without 4h→h: (16h + 4s)/(72h + 12s)"),
    )
    _, _, h, s = shape.letters()
    values = [float(100 * share) for _, share, _, _ in bars]
    stopped = Fraction(bars[4][1])
    axis = Axis("FLOPs added to one layer, forward and backward", axis_end(2.3 * max(values)))
    return Drawing(
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [name],
                "x": [value],
                "text": [f"{value:.2f}%  {why}"],
                "textposition": "outside",
                "textangle": 0,
                "cliponaxis": False,
                "marker": fill.marker(),
                "hovertemplate": f"<b>{name}</b>: {value:.3f}%<br>{why}<extra></extra>",
                "showlegend": False,
            }
            for (name, _, fill, why), value in zip(bars, values)
        ],
        {
            "title": {
                "text": f"s = {s:,}, h = {h:,}: the core once more is {values[1]:.2f}%, not {values[0]:.2f}%;<br>full recomputation can stop at {float(100 * stopped):.1f}%"
            },
            "xaxis": {
                "title": {"text": axis.title},
                "range": [0, axis.end],
                "ticksuffix": "%",
            },
            "yaxis": {"categoryorder": "array", "categoryarray": [bar[0] for bar in bars][::-1]},
            "height": 360,
            "bargap": 0.3,
            "margin": {"b": 60},
        },
        f"Bars of FLOPs added at s={s}, h={h}: "
        + ", ".join(f"{bar[0]} {value:.2f}%" for bar, value in zip(bars, values))
        + ".",
        axis,
    )
