"""Bars of what a cell has computed or measured: the figure in place of a printed table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from actmem_course.figures.marks import Axis, Drawing, bars, chart, line
from actmem_course.figures.style import CARD, INK, PAINT, Fill, axis_end, axis_unit, size_text, three_digits

#: In the order of a chart's parts.  The first is what the chart is about.
_PARTS = (PAINT["blue"], PAINT["red"], PAINT["orange"], PAINT["sky"], PAINT["green"])
#: With more bars than this they are drawn closer together.
_MANY = 6
#: Names that are longer stand above their bars; pixels of a line of words, and of a bar.
_LONGEST, _LINE, _BAR = 24, 18, 22


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
    if len(parts) > len(fills):
        raise ValueError(f"fills: {len(parts)} parts need as many, got {len(fills)}")
    names = list(order or dict.fromkeys(name for values in parts.values() for name in values))
    above = max(map(len, names)) > _LONGEST
    lines = {name: "<br>".join(wrap(name, 42)) for name in names}
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
    end = axis_end(longest / step)
    if longest / step > 0.97 * end:
        end *= 1.1  # or the longest bar's words would leave the card
    each = (_BAR if len(parts) < 4 else 19) if beside else _BAR
    thick = each * (len(parts) if beside else 1)
    row = thick + (_LINE * tallest + 8 if above else 14 if beside else 22 if len(names) <= _MANY else 10)
    told_names: list[dict] = []
    if above:
        # Each bar at the foot of its row, its name over it.
        for number, trace in enumerate(traces[: len(parts)]):
            trace |= {"width": each / row, "offset": 0.46 - (thick - each * number * beside) / row}
        over = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False}
        over |= {"bgcolor": CARD, "borderpad": 0} if limit else {}  # the limit's line passes behind the words
        told_names = [{**over, "y": text, "yshift": thick - 0.46 * row, "text": text} for text in lines.values()]
    beyond = {"showarrow": False, "xanchor": "left", "bgcolor": CARD, "borderpad": 0}
    if above:
        beyond["yshift"] = thick / 2 - 0.46 * row
    words = max(map(len, [*sums.values(), *(text for trace in traces for text in trace.get("text", ()))]))
    return chart(
        title,
        traces,
        f"Bars, {axis}: {told}.",
        Axis(axis, end, step, in_unit=f" ({step_name})"),
        barmode="group" if beside else "stack",
        height=180 + row * len(names),
        bargap=0.3,
        showlegend=bool(limit) or len(parts) > 1 and any(len(values) > 1 for values in parts.values()),
        legend={"traceorder": "normal"},
        margin={"r": min(max(24, 8 * words), 150), "l": 16 if above else 60},
        yaxis={
            "categoryorder": "array", "categoryarray": [*lines.values()], "range": [len(names) - 0.5, -0.5],
            "automargin": not above, "showticklabels": not above,
        },
        annotations=told_names + [
            {"x": sum(ends[name]) / step, "y": lines[name], "text": f" {text}", **beyond} for name, text in sums.items()
        ],
        **layout,
    )  # fmt: skip
