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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actmem_course.figures.style import CONFIG, INK, PURPLE, TEMPLATE, Fill


@dataclass(frozen=True)
class Axis:
    """The axis along which bars grow from 0 to ``end``.

    Attributes:
        words, in_unit: Its title; the second part names the unit, as in ``" (GiB)"``.
        end: In its own unit.
        unit: Bytes, or what else is counted, in one step of it.
    """

    words: str
    end: float
    unit: float = 1
    in_unit: str = ""

    @property
    def title(self) -> str:
        """What stands below the axis."""
        return self.words + self.in_unit


@dataclass(frozen=True)
class GuessLine:
    """Where a guess stands in a figure: a line across ``axis`` at start + per · guess.

    Attributes:
        per, start: In the smallest unit of the drawing's Axis, which is mostly bytes; in a drawing without Axis, in
            units of its axis.
        axis: ``x``, ``y``, or one of several.
        figure: Which of several drawings.
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
    """What a function that draws returns.

    Attributes:
        traces, layout: As plotly.js takes them.
        alt: The finding in words, with its numbers.
        axis: Of a chart of bars, the axis that a slider should leave in place; None where it is always the same.
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
    """A drawing with its title, of one or two lines; what ``axis`` says, and the layout's further properties by
    name.
    """
    if axis is not None:
        layout["xaxis"] = scale(axis.title, 0, axis.end, **layout.get("xaxis", {}))
    return Drawing(traces, {"title": {"text": title}, **layout}, alt, axis)


def scale(title: str, low: float | None = None, high: float | None = None, **more: Any) -> dict:
    """An axis with its title, from ``low`` to ``high`` if they are given."""
    ends: dict[str, Any] = {} if low is None else {"range": [low, high]}
    return {"title": {"text": title}, **ends, **more}


def log_scale(title: str, ticks: Iterable[float], texts: Iterable[str] = (), **more: Any) -> dict:
    """A logarithmic axis with its ticks, and their texts if the numbers won't do."""
    words = {"ticktext": list(texts)} if texts else {}
    return {"type": "log", **scale(title), "tickvals": list(ticks), **words, **more}


def _trace(kind: str, name: str, x: Iterable, y: Iterable, hover: str | None, more: dict) -> dict:
    said = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    said = {} if more.keys() & {"hoverinfo", "hovertemplate"} else said
    return {"type": kind, **({"name": name} if name else {}), "x": list(x), "y": list(y), **said, **more}


def bars(name: str, names: Iterable, values: Iterable, fill: Fill, hover: str | None = None, **more: Any) -> dict:
    """A bar at each of ``names``."""
    return _trace("bar", name, values, names, hover, {"orientation": "h", "marker": fill.marker(), **more})


def legend(fills: dict[str, Fill]) -> list[dict]:
    """An empty bar for each entry of the legend, whatever the bars that are drawn."""
    return [bars(name, [None], [None], fill) for name, fill in fills.items()]


def line(
    name: str, x: Iterable, y: Iterable, colour: str, hover: str | None = None,
    dash: str = "", width: float = 3, shape: str = "", symbol: str = "", size: float | list = 6, **more: Any,
) -> dict:  # fmt: skip
    """A line through points, which ``symbol`` shows, one ``size`` for all or one for each."""
    given = {"dash": dash, "shape": shape}
    look = {"color": colour, "width": width, **{key: value for key, value in given.items() if value}}
    if symbol:
        edge = {"color": INK, "width": 1}
        more = {
            "mode": "lines+markers",
            "marker": {"color": colour, "size": size, "symbol": symbol, "line": edge},
            **more,
        }
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
