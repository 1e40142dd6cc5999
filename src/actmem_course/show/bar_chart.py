"""Bars of what a cell has computed or measured: the figure in place of a printed table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from actmem_course.show.marks import Axis, Drawing, bars, chart
from actmem_course.show.style import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    VERMILION,
    Fill,
    axis_end,
    axis_unit,
    size_text,
    three_digits,
)

#: In the order of a chart's parts.  The first is what the chart is about.
_PARTS = (Fill(BLUE, "", "#FFFFFF"), Fill(VERMILION, "/"), Fill(ORANGE, "x"), Fill(SKY, "-"), Fill(GREEN, "."))


def bar_chart(
    title: str,
    parts: Mapping[str, Mapping[str, float]],
    axis: str,
    unit: str = "",
    beside: bool = False,
    fills: Sequence[Fill] = _PARTS,
) -> Drawing:
    """Parts on top of each other or ``beside`` each other: each has a value for each bar.

    unit: of the values; "" for bytes, which the axis shows in GiB or smaller and the pointer in full.
    """
    names = list(dict.fromkeys(name for values in parts.values() for name in values))
    # Long names in lines, so that a narrow page has room for the bars.
    lines = {name: "<br>".join(wrap(name, 24)) for name in names}
    tallest = max(line.count("<br>") + 1 for line in lines.values())
    ends = {name: [values.get(name, 0) for values in parts.values()] for name in names}
    longest = max(max(each) if beside else sum(each) for each in ends.values())
    step, step_name = (1, unit) if unit else axis_unit(int(longest))

    def said(value: float) -> str:
        if not unit and value < step / 100:
            return size_text(int(value))
        return f"{three_digits(value / step)} {step_name}".replace(" %", "%")

    def hover(value: float) -> str:
        return said(value) if unit else f"{int(value):,} B"

    traces = [
        bars(
            part,
            map(lines.get, values),
            [value / step for value in values.values()],
            fill,
            f"%{{y}}, {part}: %{{customdata}}",
            [said(value) if beside else "" for value in values.values()],
            "outside",
            customdata=list(map(hover, values.values())),
        )
        for (part, values), fill in zip(parts.items(), fills)
    ]
    sums = (
        []
        if beside
        else [{"x": sum(each) / step, "y": lines[name], "text": f" {said(sum(each))}"} for name, each in ends.items()]
    )
    told = "; ".join(
        f"{name} "
        + ", ".join(f"{part} {said(values[name])}".strip() for part, values in parts.items() if name in values)
        for name in names
    )
    return chart(
        title,
        traces,
        f"Bars, {axis}: {told}.",
        Axis(f"{axis} ({step_name})", 115 if unit == "%" and longest > 75 else axis_end(1.15 * longest / step), step),
        barmode="group" if beside else "stack",
        height=180 + max(14 + 24 * len(parts) if beside else 44, 12 + 18 * tallest) * len(names),
        bargap=0.3,
        showlegend=len(parts) > 1,
        legend={"traceorder": "normal"},
        yaxis={"autorange": "reversed", "automargin": True},
        annotations=[{"showarrow": False, "xanchor": "left", **one} for one in sums],
    )
