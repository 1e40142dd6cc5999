"""Bar charts, which notebooks show instead of printed tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from actmem_course.figures.marks import Axis, Drawing, bars, chart, line
from actmem_course.figures.style import CARD, FILLS, INK, Fill
from actmem_course.figures.units import axis_end, axis_unit, size_text, three_digits

#: Fills of a chart's parts, in order: of parts in bytes, and of other numbers.  The first part is the chart's subject.
_BYTES = [FILLS[what] for what in ("activations", "others", "second number", "third number")]
_NUMBERS = [FILLS[what] for what in ("number", "second number", "third number", "others", "freed")]
#: Pixels of a bar, of a thin bar, and of a line of words.  Names stand above their bars, so that a narrow page has room
#: for both.
_BAR, _THIN_BAR, _LINE = 22, 19, 18
#: The most letters of a name in one line.
_NAME = 42


@dataclass(frozen=True)
class _Unit:
    """What the axis counts in: ``step`` bytes, or one of the unit that a caller named."""

    step: float
    name: str
    is_bytes: bool

    def text(self, value: float) -> str:
        """Return a value as the words at its bar: ``2.67 GiB``, ``12.5%``."""
        if self.is_bytes and value < self.step / 100:
            return size_text(int(value))
        return f"{three_digits(value / self.step)} {self.name}".replace(" %", "%")

    def full(self, value: float) -> str:
        """Return a value as shown to a pointer on its bar: bytes to the last one."""
        return f"{int(value):,} B" if self.is_bytes else self.text(value)


def bar_chart(
    title: str,
    parts: Mapping[str, Mapping[str, float | None]],
    axis: str,
    unit: str = "",
    beside: bool = False,
    fills: Sequence[Fill] = (),
    order: Sequence[str] = (),
    notes: Mapping[str, str] = {},
    about: Mapping[str, str] = {},
    says: Mapping[str, Mapping[str, str]] = {},
    room_for: float = 0,
    limit: tuple[str, float] | None = None,
) -> Drawing:
    """Draw a horizontal bar for each name. The parts of a bar are stacked, or with ``beside`` drawn next to each other.

    Args:
        title: The finding, as the chart's title, with ``<br>`` between its lines.
        parts: For each part, by its name in the legend, its value in each bar, by the bar's name. A bar whose values
            are all None stays empty.
        axis: Title of the axis: what the values are.
        unit: The values' unit. "" is for bytes: the axis then shows KiB, MiB or GiB, the hover text all digits.
        beside: Whether the parts of a bar are drawn next to each other, each with its value.
        fills: Colour and pattern of each part; if empty, the course's fills in their order.
        order: Names of the bars from the top; if empty, in the order of ``parts``.
        notes: Text after a bar in place of its sum, by the bar's name.
        about: Text added to the hover text of a bar, by the bar's name.
        says: Text in place of a value: by the part's name, then by the bar's name.
        room_for: A value that the axis must reach, even if no bar does.
        limit: Name and value of a line across all bars; None for no line.

    Raises:
        ValueError: There are more parts than fills.
    """
    fills = fills or (_NUMBERS if unit else _BYTES)
    if len(parts) > len(fills):
        raise ValueError(f"fills: {len(parts)} parts need as many, got {len(fills)}")
    names = list(order or dict.fromkeys(name for values in parts.values() for name in values))
    sizes = {name: [size for values in parts.values() if (size := values.get(name)) is not None] for name in names}
    ends = {name: (max if beside else sum)(each) for name, each in sizes.items() if each}
    longest = max([room_for, *ends.values()])
    counts = _Unit(1, unit, False) if unit else _Unit(*axis_unit(int(longest)), True)
    known = [name for name in names if sizes[name] or name in notes]
    lines = {name: "<br>".join(wrap(name, _NAME)) for name in names}
    bar = _THIN_BAR if beside and len(parts) > 3 else _BAR
    group = bar * (len(parts) if beside else 1)
    row = group + _LINE * max(text.count("<br>") + 1 for text in lines.values()) + 8

    traces = [
        _part(part, values, fill, counts, lines, about, says.get(part, {}))
        for (part, values), fill in zip(parts.items(), fills)
    ]
    # After each bar: its name, its words, where it ends, how far its middle is above the foot of the row.
    after = [(name, notes.get(name) or counts.text(ends[name]), ends.get(name, 0), bar / 2) for name in known]
    if beside:
        after = [
            (name, says.get(part, {}).get(name) or counts.text(size), size, group - bar * (number + 0.5))
            for number, (part, values) in enumerate(parts.items())
            for name, size in values.items()
            if size is not None
        ]
    # Words in place of a bar have the room of the bar.
    words = max((len(text) for _, text, end, _ in after if end or not beside), default=0)
    for number, trace in enumerate(traces):
        # At the foot of the row, below its name.
        trace |= {"width": bar / row, "offset": 0.46 - (group - bar * number * beside) / row}
    layout: dict = {}
    if limit:
        # The line runs past the first and the last bar, where a category axis ends: it has an axis of its own.
        across = [-0.6, len(names) - 0.4]
        at = [limit[1] / counts.step] * 2
        traces.append(line(f"{limit[0]}, {counts.text(limit[1])}", at, across, INK, None, "dash", 2.5, yaxis="y2"))
        layout = {"yaxis2": {"overlaying": "y", "visible": False, "range": across, "fixedrange": True}}
    # The lines of a limit and of a guess pass behind the words.
    plain = {"showarrow": False, "xanchor": "left", "bgcolor": CARD, "borderpad": 0}
    over = {**plain, "xref": "paper", "x": 0, "yanchor": "bottom", "align": "left"}
    annotations = [{**over, "y": text, "yshift": group - 0.46 * row, "text": text} for text in lines.values()]
    for name, text, end, above_foot in after:
        beyond = {**plain, "x": end / counts.step, "y": lines[name]}
        annotations.append({**beyond, "yshift": above_foot - 0.46 * row, "text": f" {text}"})
    has_legend = len(parts) > 1 and any(len(values) > 1 for values in parts.values())
    return chart(
        title,
        traces,
        f"Bars, {axis}: {_told(known, parts, notes, says, counts)}.",
        Axis(axis, _room(longest / counts.step), counts.step, in_unit=f" ({counts.name})"),
        barmode="group" if beside else "stack",
        height=180 + row * len(names),
        bargap=0.3,
        showlegend=bool(limit) or has_legend,
        legend={"traceorder": "normal"},
        margin={"r": min(max(24, 8 * words), 210), "l": 16},
        yaxis={
            "categoryorder": "array",
            "categoryarray": [*lines.values()],
            "range": [len(names) - 0.5, -0.5],
            "automargin": False,
            "showticklabels": False,
            "showgrid": False,
        },
        annotations=annotations,
        **layout,
    )


def _part(
    part: str,
    values: Mapping[str, float | None],
    fill: Fill,
    counts: _Unit,
    lines: Mapping[str, str],
    about: Mapping[str, str],
    says: Mapping[str, str],
) -> dict:
    """Return the trace of one part, in all bars."""
    pointed_at = [
        f"{name if name == part else f'{name}, {part}'}:<br>"
        + "<br>".join(filter(None, (says.get(name) or counts.full(value or 0), about.get(name))))
        for name, value in values.items()
    ]
    return bars(
        part,
        map(lines.get, values),
        [value if value is None else value / counts.step for value in values.values()],
        fill,
        "%{customdata}",
        customdata=pointed_at,
    )


def _told(
    names: Sequence[str],
    parts: Mapping[str, Mapping],
    notes: Mapping[str, str],
    says: Mapping[str, Mapping[str, str]],
    counts: _Unit,
) -> str:
    """Return all bars in words, for readers who can't see them."""
    told = []
    for name in names:
        sizes = {part: of[name] for part, of in parts.items() if of.get(name) is not None}
        shown = {part: says.get(part, {}).get(name) or counts.text(size) for part, size in sizes.items()}
        text = f"{name} " + ", ".join(f"{part} {size}".strip() for part, size in shown.items())
        told.append(f"{text}: {notes[name]}" if name in notes else text)
    return "; ".join(told)


def _room(longest: float) -> float:
    """Return where the axis ends: a little beyond the longest bar, whose words would otherwise leave the card."""
    end = axis_end(longest)
    return end if longest <= 0.97 * end else 1.1 * end
