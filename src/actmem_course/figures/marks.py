"""What every figure is made of: bars, lines, points, words and boxes, their axes, and the Drawing that they add up to.

A function that draws takes rows or sizes and returns a Drawing; it changes nothing and
displays nothing.  Moving a slider calls it again, and the figure on screen changes in place.

Marks and axes are plain dicts as plotly.js takes them: plotly's Python classes check every property each time,
which would slow a slider down; the tests check each drawing with them instead.  Every mark takes further
properties of its trace by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actmem_course.figures.style import BLUE, CONFIG, GREEN, INK, ORANGE, PURPLE, SKY, TEMPLATE, VERMILION, YELLOW, Fill

#: Layout of a chart whose bars lie on top of each other.
STACKED: dict[str, Any] = {"barmode": "stack", "legend": {"traceorder": "normal"}}
#: Text in bars is shown where it fits at this size or a larger one.
FITTING: dict[str, Any] = {"uniformtext": {"mode": "hide", "minsize": 11}}


@dataclass(frozen=True)
class Axis:
    """The axis along which bars grow from 0 to ``end``; unit: bytes, or what else is counted, in one step of it.

    words, in_unit: its title, the second part of which names the unit: ``" (GiB)"``.
    """

    words: str
    end: float
    unit: float = 1
    along: str = "x"
    in_unit: str = ""

    @property
    def title(self) -> str:
        """What stands below the axis."""
        return self.words + self.in_unit


@dataclass(frozen=True)
class GuessLine:
    """Where a guess stands in a figure: a line across ``axis`` at start + per · guess.

    Both count the smallest unit of the drawing's Axis, which is bytes of most; of a drawing without one, the axis itself.
    figure: which of several drawings.
    """

    per: float = 1
    start: float = 0
    axis: str = "x"
    figure: int = 0

    def shape(self) -> dict:
        """The line as plotly has it, and its words; the page puts it at the guess."""
        across = "y" if self.axis[0] == "x" else "x"
        place = {f"{self.axis[0]}ref": self.axis, f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1}
        anchors = {"yanchor": "bottom", **({"xanchor": "right"} if across == "x" else {})}
        name = {"text": "your guess", "textangle": 0, "textposition": "end", **anchors}
        return {"type": "line", **place, "line": {"color": PURPLE, "width": 3, "dash": "dot"}, "label": name}


@dataclass(frozen=True)
class Drawing:
    """traces and layout as plotly.js takes them; alt: the finding in words, with its numbers.

    axis: of a chart of bars, what a slider should leave in place; None where the axis is always the same.
    """

    traces: list[dict]
    layout: dict
    alt: str
    axis: Axis | None = None

    def spec(self) -> dict:
        """data, layout and config for plotly.js, in the course's style."""
        layout = {"template": TEMPLATE, "autosize": True, "height": 420, **self.layout}
        # Copies of what all drawings share: plotly.io writes its own entries into what it is given.
        return {"data": self.traces, "layout": layout, "config": dict(CONFIG)}

    def fingerprint(self) -> str:
        """Changes if and only if the drawing does: shows whether a stored picture is up to date."""
        return hashlib.sha256(json.dumps(self.spec(), sort_keys=True).encode()).hexdigest()[:16]


def chart(title: str, traces: list[dict], alt: str, axis: Axis | None = None, **layout: Any) -> Drawing:
    """A drawing with its title, of one or two lines; what ``axis`` says, and the layout's further properties by name."""
    if axis is not None:
        name = f"{axis.along}axis"
        layout[name] = scale(axis.title, 0, axis.end, **layout.get(name, {}))
    return Drawing(traces, {"title": {"text": title}, **layout}, alt, axis)


def scale(title: str, low: float | None = None, high: float | None = None, **more: Any) -> dict:
    """An axis with its title, from ``low`` to ``high`` if they are given."""
    ends: dict[str, Any] = {} if low is None else {"range": [low, high]}
    return {"title": {"text": title}, **ends, **more}


def log_scale(title: str, ticks: Iterable[float], texts: Iterable[str] = (), **more: Any) -> dict:
    """A logarithmic axis with its ticks, and their texts if the numbers won't do."""
    words = {"ticktext": list(texts)} if texts else {}
    return {"type": "log", **scale(title), "tickvals": list(ticks), **words, **more}


def downwards(names: Iterable[str], **more: Any) -> dict:
    """An axis of names, the first on top."""
    return {"categoryorder": "array", "categoryarray": [*names][::-1], **more}


def _trace(kind: str, name: str, x: Iterable, y: Iterable, hover: str | None, more: dict) -> dict:
    said = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    said = {} if more.keys() & {"hoverinfo", "hovertemplate"} else said
    return {"type": kind, **({"name": name} if name else {}), "x": list(x), "y": list(y), **said, **more}


def bars(
    name: str, names: Iterable, values: Iterable, fill: Fill, hover: str | None = None,
    text: Sequence[str] = (), where: str = "inside", along: str = "x", **more: Any,
) -> dict:  # fmt: skip
    """A bar at each of ``names``, its text ``where``: inside, outside, or auto."""
    if text:
        inside = {"insidetextanchor": "middle", "textangle": 0, "insidetextfont": {"color": fill.text, "size": 13}}
        places: dict[str, dict] = {"inside": inside, "outside": {"textangle": 0, "cliponaxis": False}}
        more = {"text": list(text), "textposition": where, **places.get(where, {}), **more}
    if along == "x":
        return _trace("bar", name, values, names, hover, {"orientation": "h", "marker": fill.marker(), **more})
    return _trace("bar", name, names, values, hover, {"marker": fill.marker(), **more})


def legend(fills: dict[str, Fill], along: str = "x") -> list[dict]:
    """An empty bar for each entry of the legend, whatever the bars that are drawn."""
    return [bars(name, [None], [None], fill, along=along) for name, fill in fills.items()]


def line(
    name: str, x: Iterable, y: Iterable, colour: str, hover: str | None = None,
    dash: str = "", width: float = 3, shape: str = "", **more: Any,
) -> dict:  # fmt: skip
    """A line through points; ``mode="lines+markers"`` and ``marker`` show them."""
    given = {"dash": dash, "shape": shape}
    look = {"color": colour, "width": width, **{key: value for key, value in given.items() if value}}
    return _trace("scatter", name, x, y, hover, {"mode": "lines", "line": look, **more})


def points(
    name: str, x: Iterable, y: Iterable, colour: str, hover: str | None = None,
    symbol: str = "", size: float = 13, edge: float = 1.5, **more: Any,
) -> dict:  # fmt: skip
    """Points with a dark edge."""
    shape = {"symbol": symbol} if symbol else {}
    marker = {"color": colour, "size": size, **shape, "line": {"color": INK, "width": edge}}
    return _trace("scatter", name, x, y, hover, {"mode": "markers", "marker": marker, **more})


def words(x: Iterable, y: Iterable, text: Iterable[str], size: int = 0, position: str = "", **more: Any) -> dict:
    """Words beside or between other marks."""
    look: dict = {"textfont": {"size": size, "color": INK}} if size else {}
    look |= {"textposition": position} if position else {}
    shown = {"mode": "text", "text": list(text), "showlegend": False, "cliponaxis": False, **look, **more}
    return _trace("scatter", "", x, y, None, shown)


#: One fill for each rank, in diagrams that colour by rank; the box has the rank's number as well.
RANK_FILLS = (
    Fill(BLUE, "", "#FFFFFF"), Fill(ORANGE, ""), Fill(GREEN, "", "#FFFFFF"), Fill(PURPLE, ""),
    Fill(SKY, ""), Fill(VERMILION, "", "#FFFFFF"), Fill(YELLOW, ""), Fill("#555555", "", "#FFFFFF"),
)  # fmt: skip
#: What every rank holds a copy of, what is missing, and a frame around boxes.
WHOLE, EMPTY = Fill("#BBBBBB", "/"), Fill("#FFFFFF", "")


@dataclass(frozen=True)
class Box:
    """A rectangle whose top left corner is (x, y), in units of the diagram; y grows downwards.  text: inside; hover: shown when the pointer is on it."""

    x: float
    y: float
    width: float
    height: float
    fill: Fill
    text: str = ""
    hover: str = ""

    def outline(self) -> tuple[list[float], list[float]]:
        """Its corners, around and back to the first."""
        right, bottom = self.x + self.width, self.y + self.height
        return [self.x, right, right, self.x, self.x], [self.y, self.y, bottom, bottom, self.y]


def boxes(all_boxes: Iterable[Box], text_size: int = 13) -> list[dict]:
    """Diagrams of tensors and ranks: one outline for each fill, frames (EMPTY) behind the rest, then all words and hover texts."""
    every = list(all_boxes)
    by_fill: dict[Fill, list[Box]] = {}
    for box in every:
        by_fill.setdefault(box.fill, []).append(box)
    frames_first = sorted(by_fill.items(), key=lambda pair: pair[0] != EMPTY)
    inside = words(
        [box.x + box.width / 2 for box in every], [box.y + box.height / 2 for box in every],
        # plotly.js takes the node of an empty text away, and the next state of the figure would have no place for its word.
        [box.text or "\u00a0" for box in every],
        position="middle center", textfont={"size": text_size, "color": [box.fill.text for box in every]},
        # An invisible marker, for the pointer to find.
        mode="markers+text", marker={"size": 22, "opacity": 0},
        customdata=[box.hover or box.text for box in every], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    del inside["cliponaxis"]
    return [*(_outlines(fill, group) for fill, group in frames_first), inside]


def labels(placed: Iterable[tuple[float, float, str]], size: int = 14, position: str = "middle center") -> dict:
    """Words without boxes: (x, y, text) each."""
    xs, ys, texts = zip(*placed)
    return words(xs, ys, texts, size, position)


def diagram(
    title: str, traces: list[dict], alt: str, width: float, height: float, pixels: int, left: float = 0, top: float = 0
) -> Drawing:
    """A drawing of boxes: hidden axes, y downwards from ``top`` to ``height``; pixels: the figure's height."""
    hidden = {"visible": False, "fixedrange": True}
    return chart(
        title, traces, alt, height=pixels, xaxis={**hidden, "range": [left, width]}, yaxis={**hidden, "range": [height, top]},
        showlegend=False, margin={"l": 12, "r": 12, "t": 76, "b": 12}, hovermode="closest",
    )  # fmt: skip


def _outlines(fill: Fill, group: list[Box]) -> dict:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for box in group:
        around_x, around_y = box.outline()
        xs += [*around_x, None]
        ys += [*around_y, None]
    pattern: dict[str, Any] = {"fillpattern": {**fill.texture(), "bgcolor": fill.colour}} if fill.pattern else {}
    return line("", xs, ys, INK, width=1, fill="toself", fillcolor=fill.colour, showlegend=False, **pattern)
