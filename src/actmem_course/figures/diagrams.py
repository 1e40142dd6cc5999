"""Draw diagrams of tensors and ranks from boxes and words, on hidden axes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actmem_course.figures.marks import Drawing, chart, line, points, words
from actmem_course.figures.style import Fill

#: The fill of a frame around boxes, and of a box for something that is missing.
EMPTY = Fill("#FFFFFF", "")
#: How many invisible points with hover text there are across the whole diagram.
_POINTS_ACROSS = 24


@dataclass(frozen=True)
class Box:
    """A rectangle.

    Attributes:
        x: The x of the rectangle's left edge, in units of the diagram.
        y: The y of its upper edge; y grows downwards.
        width: Its width in the same units.
        height: Its height in the same units.
        fill: Its colour and pattern.
        text: The text in it; "" for none.
        hover: Its hover text; "" to show ``text``.
    """

    x: float
    y: float
    width: float
    height: float
    fill: Fill
    text: str = ""
    hover: str = ""

    def outline(self) -> tuple[list[float], list[float]]:
        """Return the x values and the y values of the rectangle's four corners in order, and of the first again."""
        right, bottom = self.x + self.width, self.y + self.height
        return [self.x, right, right, self.x, self.x], [self.y, self.y, bottom, bottom, self.y]


def boxes(all_boxes: Iterable[Box], text_size: int = 13) -> list[dict]:
    """Return the plotly traces that draw some boxes.

    All boxes of one fill are one trace, empty frames first; the texts and hover texts come last.

    Args:
        all_boxes: The boxes, in units of the diagram.
        text_size: Size of the letters in the boxes, in pixels.
    """
    every = list(all_boxes)
    by_fill: dict[Fill, list[Box]] = {}
    for box in every:
        by_fill.setdefault(box.fill, []).append(box)
    frames_first = sorted(by_fill.items(), key=lambda pair: pair[0] != EMPTY)
    inside = words(
        [box.x + box.width / 2 for box in every], [box.y + box.height / 2 for box in every],
        # plotly.js takes the node of an empty text away, and the next state of the figure would have no place for
        # its word.
        [box.text or "\u00a0" for box in every],
        position="middle center", textfont={"size": text_size, "color": [box.fill.text for box in every]},
        # An invisible marker, for the pointer to find.
        mode="markers+text", marker={"size": 22, "opacity": 0},
        customdata=[box.hover or box.text for box in every], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    del inside["cliponaxis"]
    return [*_along(every), *(_outlines(fill, group) for fill, group in frames_first), inside]


def _along(every: Sequence[Box]) -> list[dict]:
    """Return invisible points along wide boxes, so that a pointer anywhere on them shows their hover text."""
    apart = max((box.x + box.width for box in every), default=1) / _POINTS_ACROSS
    places = [(box, (i + 0.5) * apart) for box in every for i in range(int(box.width / apart))]
    if not places:
        return []
    x, y = [box.x + at for box, at in places], [box.y + box.height / 2 for box, _ in places]
    look: dict[str, Any] = {"showlegend": False, "customdata": [box.hover or box.text for box, _ in places]}
    return [points("", x, y, EMPTY.colour, "%{customdata}", size=22, opacity=0, **look)]


def labels(placed: Iterable[tuple[float, float, str]], size: int = 14, position: str = "middle center") -> dict:
    """Return a plotly trace of texts without boxes.

    Args:
        placed: For each text a tuple (x, y, text).
        size: Size of the letters, in pixels.
        position: Where a text stands relative to its point, plotly's ``textposition``.
    """
    xs, ys, texts = zip(*placed)
    return words(xs, ys, texts, size, position)


def diagram(
    title: str,
    traces: list[dict],
    alt: str,
    width: float,
    height: float,
    pixels: int,
    left: float = 0,
    top: float = 0,
    margins: tuple[int, int] = (12, 12),
) -> Drawing:
    """Make a drawing of boxes, with hidden axes and y growing downwards.

    Args:
        title: The finding.
        traces: Plotly traces, such as those of ``boxes``.
        alt: The alt text: the finding with its numbers.
        width: The largest x of the diagram.
        height: The largest y of the diagram.
        pixels: The figure's height on screen.
        left: The smallest x.
        top: The smallest y.
        margins: Space for texts to the left and to the right of the boxes, in pixels.
    """
    hidden = {"visible": False, "fixedrange": True}
    return chart(
        title, traces, alt, height=pixels, margin={"l": margins[0], "r": margins[1], "t": 76, "b": 12},
        xaxis={**hidden, "range": [left, width]}, yaxis={**hidden, "range": [height, top]},
        showlegend=any(trace.get("name") for trace in traces), hovermode="closest",
    )  # fmt: skip


def _outlines(fill: Fill, group: list[Box]) -> dict:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for box in group:
        around_x, around_y = box.outline()
        xs += [*around_x, None]
        ys += [*around_y, None]
    pattern: dict[str, Any] = {"fillpattern": {**fill.texture(), "bgcolor": fill.colour}} if fill.pattern else {}
    return line("", xs, ys, fill.edge, width=1, fill="toself", fillcolor=fill.colour, showlegend=False, **pattern)
