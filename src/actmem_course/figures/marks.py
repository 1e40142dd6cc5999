"""The marks that every figure consists of (bars, lines, points, words), their axes, and ``Drawing``, the figure.

A function that draws takes rows or sizes and returns a Drawing; it changes nothing and displays nothing. When a slider
moves, the function is called again, and the figure on screen changes in place.

Marks and axes are plain dicts for plotly.js. plotly's Python classes would check every property each time, which would
slow sliders down; the tests check each drawing with these classes. Functions of marks pass further keyword arguments
on as properties of the plotly trace.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actmem_course.figures.style import CONFIG, INK, PURPLE, TEMPLATE, Fill


@dataclass(frozen=True)
class Axis:
    """The value axis of a bar chart, from 0 to ``end``.

    Attributes:
        words, in_unit: The two parts of its title; the second names the unit, such as ``" (GiB)"``.
        end: The largest value on the axis, in the axis's unit.
        unit: The axis's unit, as a number of bytes (2**30 for GiB); 1 for values that aren't bytes.
    """

    words: str
    end: float
    unit: float = 1
    in_unit: str = ""

    @property
    def title(self) -> str:
        """The text below the axis."""
        return self.words + self.in_unit


@dataclass(frozen=True)
class GuessLine:
    """The place of the line that marks a reader's guess in a figure: start + per · guess on one of its axes.

    Attributes:
        per, start: Numbers of that formula, in bytes if the drawing has an ``Axis`` of bytes, else in units of the
            plotly axis.
        axis: The plotly axis: ``x`` or ``y``, with a number if the figure has several, such as ``x2``.
        figure: The index of the drawing, if the cell has several.
    """

    per: float = 1
    start: float = 0
    axis: str = "x"
    figure: int = 0

    def shape(self) -> dict:
        """Return the line and its label as a plotly shape; the page moves it to the guess."""
        across = "y" if self.axis[0] == "x" else "x"
        place = {f"{self.axis[0]}ref": self.axis, f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1}
        anchors = {"yanchor": "bottom", **({"xanchor": "right"} if across == "x" else {})}
        name = {"text": "your guess", "textangle": 0, "textposition": "end", **anchors}
        return {"type": "line", **place, "line": {"color": PURPLE, "width": 3, "dash": "dot"}, "label": name}


@dataclass(frozen=True)
class Drawing:
    """A figure, for plotly.js.

    Attributes:
        traces, layout: plotly's own, as plain dicts.
        alt: The alt text: the finding with its numbers.
        axis: The value axis of a bar chart, which should stay in place while a slider moves; None if the figure's axes
            never change.
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
        """Return a hash of the drawing; a stored picture is current if its hash is the same."""
        return hashlib.sha256(json.dumps(self.spec(), sort_keys=True).encode()).hexdigest()[:16]


def chart(title: str, traces: list[dict], alt: str, axis: Axis | None = None, **layout: Any) -> Drawing:
    """Make a drawing with a title of one or two lines.

    Args:
        title: The finding.
        traces: Plotly traces.
        alt: The alt text.
        axis: The value axis of a bar chart, which becomes the x axis.
        layout: Further properties of plotly's layout, by name.
    """
    if axis is not None:
        layout["xaxis"] = scale(axis.title, 0, axis.end, **layout.get("xaxis", {}))
    return Drawing(traces, {"title": {"text": title}, **layout}, alt, axis)


def scale(title: str, low: float | None = None, high: float | None = None, **more: Any) -> dict:
    """Return a plotly axis with a title, from ``low`` to ``high`` if these are given.

    ``more`` are further properties of the axis.
    """
    ends: dict[str, Any] = {} if low is None else {"range": [low, high]}
    return {"title": {"text": title}, **ends, **more}


def log_scale(title: str, ticks: Iterable[float], texts: Iterable[str] = (), **more: Any) -> dict:
    """Return a logarithmic plotly axis with ticks at these values, and with ``texts`` at them in place of numbers."""
    words = {"ticktext": list(texts)} if texts else {}
    return {"type": "log", **scale(title), "tickvals": list(ticks), **words, **more}


def _trace(kind: str, name: str, x: Iterable, y: Iterable, hover: str | None, more: dict) -> dict:
    hover_text = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    hover_text = {} if more.keys() & {"hoverinfo", "hovertemplate"} else hover_text
    return {"type": kind, **({"name": name} if name else {}), "x": list(x), "y": list(y), **hover_text, **more}


def bars(name: str, names: Iterable, values: Iterable, fill: Fill, hover: str | None = None, **more: Any) -> dict:
    """Return a plotly trace of horizontal bars.

    Args:
        name: Its name in the legend.
        names: The place of each bar on the y axis.
        values: The length of each bar.
        fill: Colour and pattern of the bars.
        hover: Their hover text, plotly's ``hovertemplate``; None: there is none.
        more: Further properties of the trace.
    """
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
        name: Its name in the legend.
        x, y: The points.
        colour: A CSS colour.
        hover: Its hover text, plotly's ``hovertemplate``; None: there is none.
        dash, shape: plotly's names of line styles, such as "dot" and "hv".
        width: The line's width, in pixels.
        symbol: The symbol at each point; "" for none.
        size: The size of these symbols: one number for all, or one for each point.
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
    """Return a plotly trace of points.

    Args:
        name: Its name in the legend.
        x, y: The points.
        colour: A CSS colour.
        hover: Their hover text, plotly's ``hovertemplate``; None: there is none.
        symbol: plotly's name of a symbol; "" for a circle.
        size: The size of the symbols, in pixels.
        edge: The width of their dark edge, in pixels.
        more: Further properties of the trace.
    """
    shape = {"symbol": symbol} if symbol else {}
    marker = {"color": colour, "size": size, **shape, "line": {"color": INK, "width": edge}}
    return _trace("scatter", name, x, y, hover, {"mode": "markers", "marker": marker, **more})


def words(x: Iterable, y: Iterable, text: Iterable[str], size: int = 0, position: str = "", **more: Any) -> dict:
    """Return a plotly trace of texts at the points (x, y).

    Args:
        x, y: The points.
        text: The text at each point.
        size: Size of the letters in pixels; 0: the course's default.
        position: Where a text stands relative to its point, plotly's ``textposition``; "": centred.
    """
    look: dict = {"textfont": {"size": size, "color": INK}} if size else {}
    look |= {"textposition": position} if position else {}
    shown = {"mode": "text", "text": list(text), "showlegend": False, "cliponaxis": False, **look, **more}
    return _trace("scatter", "", x, y, None, shown)
