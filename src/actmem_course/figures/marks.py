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
        words: The first part of the axis's title: what the values are.
        end: The largest value on the axis, in the axis's unit.
        unit: The axis's unit, as a number of bytes (2**30 for GiB); 1 for values that aren't bytes.
        in_unit: The second part of the title, which names the unit, such as ``" (GiB)"``.
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
    """The place of the line that marks a reader's guess in a figure: start + per · guess on one of the figure's axes.

    Attributes:
        per: How far the line moves for a guess of 1: in bytes if the drawing has an ``Axis`` of bytes, else in units
            of the plotly axis.
        start: Where the line is for a guess of 0, in the same unit.
        axis: The plotly axis: ``x`` or ``y``, with a number if the figure has several, such as ``x2``.
        figure: The index, from 0, of the drawing among those of the cell.
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
        traces: The marks, as dicts of plotly's traces.
        layout: The rest of the figure, such as axes and title, as a dict of plotly's layout.
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
        """Return a hash of the drawing: a picture on disk still shows this drawing if both have the same hash."""
        return hashlib.sha256(json.dumps(self.spec(), sort_keys=True).encode()).hexdigest()[:16]


def chart(title: str, traces: list[dict], alt: str, axis: Axis | None = None, **layout: Any) -> Drawing:
    """Make a drawing with a title of one or two lines.

    Args:
        title: The finding, with ``<br>`` between its lines.
        traces: Dicts of plotly's traces, such as those of ``bars`` and ``line``.
        alt: The alt text: the finding with its numbers.
        axis: The value axis of a bar chart, which becomes the x axis; None for other figures.
        layout: Further properties of plotly's layout, by name.
    """
    if axis is not None:
        layout["xaxis"] = scale(axis.title, 0, axis.end, **layout.get("xaxis", {}))
    return Drawing(traces, {"title": {"text": title}, **layout}, alt, axis)


def scale(title: str, low: float | None = None, high: float | None = None, **more: Any) -> dict:
    """Return a dict of plotly's properties of an axis.

    Args:
        title: The text beside the axis.
        low: The smallest value on the axis; None: plotly chooses both ends.
        high: The largest value on the axis.
        more: Further properties of the axis, by plotly's names.
    """
    ends: dict[str, Any] = {} if low is None else {"range": [low, high]}
    return {"title": {"text": title}, **ends, **more}


def log_scale(title: str, ticks: Iterable[float], texts: Iterable[str] = (), **more: Any) -> dict:
    """Return a dict of plotly's properties of a logarithmic axis.

    Args:
        title: The text beside the axis.
        ticks: The values at which the axis has ticks.
        texts: The text at each tick, in place of its number; empty for numbers.
        more: Further properties of the axis, by plotly's names.
    """
    words = {"ticktext": list(texts)} if texts else {}
    return {"type": "log", **scale(title), "tickvals": list(ticks), **words, **more}


def _trace(kind: str, name: str, x: Iterable, y: Iterable, hover: str | None, more: dict) -> dict:
    hover_text = {"hoverinfo": "skip"} if hover is None else {"hovertemplate": f"{hover}<extra></extra>"}
    hover_text = {} if more.keys() & {"hoverinfo", "hovertemplate"} else hover_text
    return {"type": kind, **({"name": name} if name else {}), "x": list(x), "y": list(y), **hover_text, **more}


def bars(name: str, names: Iterable, values: Iterable, fill: Fill, hover: str | None = None, **more: Any) -> dict:
    """Return a plotly trace of horizontal bars.

    Args:
        name: The trace's name in the legend.
        names: The place of each bar on the y axis: a category or a number.
        values: The length of each bar.
        fill: Colour and pattern of the bars.
        hover: The bars' hover text, plotly's ``hovertemplate``; None for no hover text.
        more: Further properties of the trace, by plotly's names.
    """
    return _trace("bar", name, values, names, hover, {"orientation": "h", "marker": fill.marker(), **more})


def legend(fills: dict[str, Fill]) -> list[dict]:
    """Return plotly traces of empty bars, so that the legend has the same entries whichever bars are drawn.

    Args:
        fills: Colour and pattern of each entry, by the entry's name.
    """
    return [bars(name, [None], [None], fill) for name, fill in fills.items()]


def line(
    name: str, x: Iterable, y: Iterable, colour: str, hover: str | None = None,
    dash: str = "", width: float = 3, shape: str = "", symbol: str = "", size: float | list = 6, **more: Any,
) -> dict:  # fmt: skip
    """Return a plotly trace: a line through points.

    Args:
        name: The line's name in the legend.
        x: The x of each point.
        y: The y of each point.
        colour: A CSS colour.
        hover: The line's hover text, plotly's ``hovertemplate``; None for no hover text.
        dash: plotly's name of a line style, such as "dot"; "" for a solid line.
        width: The line's width, in pixels.
        shape: plotly's name of the way from point to point, such as "hv" for steps; "" for straight lines.
        symbol: plotly's name of the symbol at each point; "" for none.
        size: The size of these symbols in pixels: one number for all, or one for each point.
        more: Further properties of the trace, by plotly's names.
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
        name: The trace's name in the legend.
        x: The x of each point.
        y: The y of each point.
        colour: A CSS colour.
        hover: The points' hover text, plotly's ``hovertemplate``; None for no hover text.
        symbol: plotly's name of a symbol; "" for a circle.
        size: The size of the symbols, in pixels.
        edge: The width of the symbols' dark edge, in pixels.
        more: Further properties of the trace, by plotly's names.
    """
    shape = {"symbol": symbol} if symbol else {}
    marker = {"color": colour, "size": size, **shape, "line": {"color": INK, "width": edge}}
    return _trace("scatter", name, x, y, hover, {"mode": "markers", "marker": marker, **more})


def words(x: Iterable, y: Iterable, text: Iterable[str], size: int = 0, position: str = "", **more: Any) -> dict:
    """Return a plotly trace of texts at the points (x, y).

    Args:
        x: The x of each point.
        y: The y of each point.
        text: The text at each point.
        size: Size of the letters in pixels; 0 for the course's default.
        position: Where a text stands relative to its point, plotly's ``textposition``; "" for centred.
        more: Further properties of the trace, by plotly's names.
    """
    look: dict = {"textfont": {"size": size, "color": INK}} if size else {}
    look |= {"textposition": position} if position else {}
    shown = {"mode": "text", "text": list(text), "showlegend": False, "cliponaxis": False, **look, **more}
    return _trace("scatter", "", x, y, None, shown)
