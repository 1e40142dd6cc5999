"""What every figure is made of: bars, lines, points and words, their axes, and the Drawing that they make up.

A function that draws takes rows or sizes and returns a Drawing; it changes nothing and displays nothing. When a slider
moves it is called again, and the figure on screen changes in place.

Marks and axes are plain dicts as plotly.js takes them: plotly's Python classes check every property each time, which
would slow a slider down. The tests check each drawing with these classes instead. Every mark takes further properties
of its trace by name.
"""

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
        words, in_unit: The two parts of its title; the second names the unit, as in ``" (GiB)"``.
        end: In its own unit.
        unit: How many bytes, or of what else is counted, are one step of it.
    """

    words: str
    end: float
    unit: float = 1
    in_unit: str = ""

    @property
    def title(self) -> str:
        """What is written below the axis."""
        return self.words + self.in_unit


@dataclass(frozen=True)
class GuessLine:
    """Where a guess stands in a figure: a line across ``axis`` at start + per · guess.

    Attributes:
        per, start: In the smallest unit of the drawing's Axis, which is mostly bytes; in a drawing without an Axis, in
            units of the figure's axis.
        axis: ``x`` or ``y``, with a number if the figure has several, as in ``x2``.
        figure: The index of the drawing, if there are several.
    """

    per: float = 1
    start: float = 0
    axis: str = "x"
    figure: int = 0

    def shape(self) -> dict:
        """Return the line as plotly has it, with its words; the page moves it to the guess."""
        across = "y" if self.axis[0] == "x" else "x"
        place = {f"{self.axis[0]}ref": self.axis, f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1}
        anchors = {"yanchor": "bottom", **({"xanchor": "right"} if across == "x" else {})}
        name = {"text": "your guess", "textangle": 0, "textposition": "end", **anchors}
        return {"type": "line", **place, "line": {"color": PURPLE, "width": 3, "dash": "dot"}, "label": name}


@dataclass(frozen=True)
class Drawing:
    """A figure: what a function that draws returns.

    Attributes:
        traces, layout: As plotly.js takes them.
        alt: The finding in words, with its numbers.
        axis: The axis of a chart of bars, which a slider should leave in place; None where it is always the same.
    """

    traces: list[dict]
    layout: dict
    alt: str
    axis: Axis | None = None

    def spec(self) -> dict:
        """Return data, layout and config for plotly.js, in the course's style."""
        layout = {"template": TEMPLATE, "autosize": True, "height": 420, **self.layout}
        # Copies of what all drawings share: plotly.io writes its own entries into what it is given.
        return {"data": self.traces, "layout": layout, "config": dict(CONFIG)}

    def fingerprint(self) -> str:
        """Return a text that changes if and only if the drawing does, and so tells whether a stored
        picture is current.
        """
        return hashlib.sha256(json.dumps(self.spec(), sort_keys=True).encode()).hexdigest()[:16]


def chart(title: str, traces: list[dict], alt: str, axis: Axis | None = None, **layout: Any) -> Drawing:
    """Make a drawing with a title of one or two lines.

    Args:
        axis: Its title and its end become those of the x axis.
        layout: Further properties of plotly's layout, by name.
    """
    if axis is not None:
        layout["xaxis"] = scale(axis.title, 0, axis.end, **layout.get("xaxis", {}))
    return Drawing(traces, {"title": {"text": title}, **layout}, alt, axis)


def scale(title: str, low: float | None = None, high: float | None = None, **more: Any) -> dict:
    """Return an axis of plotly's with its title, from ``low`` to ``high`` if these are given; ``more``: more
    properties.
    """
    ends: dict[str, Any] = {} if low is None else {"range": [low, high]}
    return {"title": {"text": title}, **ends, **more}


def log_scale(title: str, ticks: Iterable[float], texts: Iterable[str] = (), **more: Any) -> dict:
    """Return a logarithmic axis of plotly's with its ticks, and with texts at the ticks if numbers don't suffice."""
    words = {"ticktext": list(texts)} if texts else {}
    return {"type": "log", **scale(title), "tickvals": list(ticks), **words, **more}


def _trace(kind: str, name: str, x: Iterable, y: Iterable, hover: str | None, more: dict) -> dict:
    hover_text = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    hover_text = {} if more.keys() & {"hoverinfo", "hovertemplate"} else hover_text
    return {"type": kind, **({"name": name} if name else {}), "x": list(x), "y": list(y), **hover_text, **more}


def bars(name: str, names: Iterable, values: Iterable, fill: Fill, hover: str | None = None, **more: Any) -> dict:
    """Return a plotly trace with a horizontal bar at each of ``names``."""
    return _trace("bar", name, values, names, hover, {"orientation": "h", "marker": fill.marker(), **more})


def legend(fills: dict[str, Fill]) -> list[dict]:
    """Return plotly traces of empty bars, so that the legend has these entries whichever bars are drawn."""
    return [bars(name, [None], [None], fill) for name, fill in fills.items()]


def line(
    name: str, x: Iterable, y: Iterable, colour: str, hover: str | None = None,
    dash: str = "", width: float = 3, shape: str = "", symbol: str = "", size: float | list = 6, **more: Any,
) -> dict:  # fmt: skip
    """Return a plotly trace: a line through points.

    Args:
        hover: What a pointer on it shows, plotly's ``hovertemplate``; None: nothing.
        dash, shape: plotly's names, such as "dot" and "hv".
        symbol: Of markers at the points; "" for none.
        size: Of the markers: one for all, or one for each.
        more: Further properties of the trace.
    """
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
    """Return a plotly trace of points with a dark edge, ``edge`` pixels wide."""
    shape = {"symbol": symbol} if symbol else {}
    marker = {"color": colour, "size": size, **shape, "line": {"color": INK, "width": edge}}
    return _trace("scatter", name, x, y, hover, {"mode": "markers", "marker": marker, **more})


def words(x: Iterable, y: Iterable, text: Iterable[str], size: int = 0, position: str = "", **more: Any) -> dict:
    """Return a plotly trace of texts at the points (x, y).

    Args:
        size: Of the letters, in pixels; 0: the style's.
        position: Where the text stands relative to its point, plotly's ``textposition``; "": centred.
    """
    look: dict = {"textfont": {"size": size, "color": INK}} if size else {}
    look |= {"textposition": position} if position else {}
    shown = {"mode": "text", "text": list(text), "showlegend": False, "cliponaxis": False, **look, **more}
    return _trace("scatter", "", x, y, None, shown)
