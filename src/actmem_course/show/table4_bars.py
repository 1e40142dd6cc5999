"""Table 4 of the paper: forward and backward of one layer, by what is recomputed."""

from __future__ import annotations

from actmem_course.others import paper
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, CARD, ORANGE, Fill

_PASSES = {"forward": Fill(BLUE, "", CARD), "backward, with what it runs again": Fill(ORANGE, "/")}


def table4_bars() -> Drawing:
    """Milliseconds of one layer of the 22B model on 8 GPUs, as printed in table 4."""
    rows = paper.TABLE4
    baseline = next(iter(rows.values())).combined_ms
    longer = {name: 100 * (row.combined_ms / baseline - 1) for name, row in rows.items()}
    full, both = longer["full recompute"], longer["selective + sequence parallel"]
    times = ([row.forward_ms for row in rows.values()], [row.backward_ms for row in rows.values()])
    traces: list[dict] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(rows),
            "x": values,
            "marker": fill.marker(),
            "text": [f"{value}" for value in values],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": fill.text, "size": 13},
            "hovertemplate": f"<b>%{{y}}</b>, {name}: %{{x}} ms<extra></extra>",
        }
        for (name, fill), values in zip(_PASSES.items(), times)
    ]
    traces.append(
        {
            "type": "scatter",
            "mode": "text",
            "x": [row.combined_ms for row in rows.values()],
            "y": list(rows),
            "text": [f" {percent:+.0f}%" if percent else " 0" for percent in longer.values()],
            "textposition": "middle right",
            "hoverinfo": "skip",
            "showlegend": False,
            "cliponaxis": False,
        }
    )
    return Drawing(
        traces,
        {
            "title": {"text": f"Recomputing everything makes a layer {full:.0f}% slower,<br>both methods of the paper {both:.0f}%"},
            "barmode": "stack",
            "bargap": 0.3,
            "height": 400,
            "xaxis": {"title": {"text": "one layer of the 22B model on 8 GPUs, milliseconds"}, "range": [0, 1.15 * max(row.combined_ms for row in rows.values())]},
            "yaxis": {"categoryorder": "array", "categoryarray": list(rows)[::-1]},
            "legend": {"traceorder": "normal"},
        },
        "Stacked bars of forward and backward in milliseconds: "
        + "; ".join(f"{name} {row.forward_ms} and {row.backward_ms}, {longer[name]:+.1f}%" for name, row in rows.items())
        + ".",
    )  # fmt: skip
