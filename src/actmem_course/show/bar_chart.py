"""Bars of what a cell has computed or measured: the figure in place of a printed table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from actmem_course.show.marks import Axis, Drawing, bars, chart, line
from actmem_course.show.style import INK, PAINT, Fill, axis_end, axis_unit, size_text, three_digits

#: In the order of a chart's parts.  The first is what the chart is about.
_PARTS = (PAINT["blue"], PAINT["red"], PAINT["orange"], PAINT["sky"], PAINT["green"])
#: With more bars than this they are drawn closer together.
_MANY = 6


def bar_chart(
    title: str,
    parts: Mapping[str, Mapping[str, float | None]],
    axis: str,
    unit: str = "",
    beside: bool = False,
    fills: Sequence[Fill] = _PARTS,
    order: Sequence[str] = (),
    notes: Mapping[str, str] = {},
    about: Mapping[str, str] = {},
    room_for: float = 0,
    limit: tuple[str, float] | None = None,
) -> Drawing:
    """Parts on top of each other or ``beside`` each other: each has a value for each bar; the place of a bar of Nones stays empty.

    unit: of the values; "" for bytes, which the axis shows in GiB or smaller and the pointer in full.
    order: the bars from the top, if not as they come.  notes: words after a bar in place of its sum.  about: what pointing at a
    bar says besides.  room_for: a value that the axis has room for.  limit: the name and value of a line across all bars.
    """
    names = list(order or dict.fromkeys(name for values in parts.values() for name in values))
    # Long names in lines, so that a narrow page has room for the bars.
    lines = {name: "<br>".join(wrap(name, 24)) for name in names}
    tallest = max(line.count("<br>") + 1 for line in lines.values())
    ends = {name: [size for values in parts.values() if (size := values.get(name)) is not None] for name in names}
    longest = max([room_for, *(max(each) if beside else sum(each) for each in ends.values() if each)])
    step, step_name = (1, unit) if unit else axis_unit(int(longest))

    def said(value: float) -> str:
        if not unit and value < step / 100:
            return size_text(int(value))
        return f"{three_digits(value / step)} {step_name}".replace(" %", "%")

    def pointed_at(name: str, value: float | None) -> str:
        return f"{said(value or 0) if unit else f'{int(value or 0):,} B'}<br>{about.get(name, '')}".removesuffix("<br>")

    traces = [
        bars(
            part,
            map(lines.get, values),
            [value if value is None else value / step for value in values.values()],
            fill,
            f"%{{y}}, {part}: %{{customdata}}",
            [said(value) if beside and value is not None else "" for value in values.values()],
            "outside",
            customdata=[pointed_at(*pair) for pair in values.items()],
        )
        for (part, values), fill in zip(parts.items(), fills)
    ]
    known = [name for name in names if ends[name] or name in notes]
    sums = {} if beside else {name: notes.get(name) or said(sum(ends[name])) for name in known}
    told = "; ".join(
        f"{name} "
        + ", ".join(f"{part} {said(size)}".strip() for part, of in parts.items() if (size := of.get(name)) is not None)
        + (f": {notes[name]}" if name in notes else "")
        for name in known
    )
    layout: dict = {}
    if limit:
        # The line runs past the first and the last bar, where a category axis ends: it has an axis of its own.
        across = [-0.6, len(names) - 0.4]
        at = [limit[1] / step] * 2
        traces.append(line(f"{limit[0]}, {said(limit[1])}", at, across, INK, None, "dash", 2.5, yaxis="y2"))
        layout = {"yaxis2": {"overlaying": "y", "visible": False, "range": across, "fixedrange": True}}
    percents = unit == "%" and 75 < longest <= 100
    row = max(
        14 + (24 if len(parts) < 4 else 19) * len(parts) if beside else 44 if len(names) <= _MANY else 32,
        12 + 18 * tallest,
    )
    return chart(
        title,
        traces,
        f"Bars, {axis}: {told}.",
        Axis(f"{axis} ({step_name})", 115 if percents else axis_end(1.15 * longest / step), step),
        barmode="group" if beside else "stack",
        height=180 + row * len(names),
        bargap=0.3,
        showlegend=bool(limit) or len(parts) > 1 and any(len(values) > 1 for values in parts.values()),
        legend={"traceorder": "normal"},
        yaxis={"categoryorder": "array", "categoryarray": [*lines.values()], "range": [len(names) - 0.5, -0.5], "automargin": True},
        annotations=[
            {"x": sum(ends[name]) / step, "y": lines[name], "text": f" {text}", "showarrow": False, "xanchor": "left"}
            for name, text in sums.items()
        ],
        **layout,
    )  # fmt: skip
