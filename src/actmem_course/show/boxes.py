"""Labelled boxes: diagrams of tensors and ranks are drawn with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actmem_course.show.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Fill

#: One fill for each rank, in diagrams that colour by rank; the box has the rank's number as well.
RANK_FILLS = (
    Fill(BLUE, "", "#FFFFFF"),
    Fill(ORANGE, ""),
    Fill(GREEN, "", "#FFFFFF"),
    Fill(PURPLE, ""),
    Fill(SKY, ""),
    Fill(VERMILION, "", "#FFFFFF"),
    Fill(YELLOW, ""),
    Fill("#555555", "", "#FFFFFF"),
)
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


def box_traces(boxes: Iterable[Box], text_size: int = 13) -> list[dict]:
    """One outline trace for each fill, frames (EMPTY) behind the rest, then one with all words and hover texts."""
    boxes = list(boxes)
    by_fill: dict[Fill, list[Box]] = {}
    for box in boxes:
        by_fill.setdefault(box.fill, []).append(box)
    frames_first = sorted(by_fill.items(), key=lambda pair: pair[0] != EMPTY)
    return [*(_outlines(fill, group) for fill, group in frames_first), _words(boxes, text_size)]


def label_trace(labels: Iterable[tuple[float, float, str]], size: int = 14, position: str = "middle center") -> dict:
    """Words without boxes: (x, y, text) each."""
    xs, ys, texts = zip(*labels)
    return {
        "type": "scatter", "mode": "text", "x": list(xs), "y": list(ys), "text": list(texts), "textposition": position,
        "textfont": {"size": size, "color": INK}, "hoverinfo": "skip", "showlegend": False, "cliponaxis": False,
    }  # fmt: skip


def diagram_layout(width: float, height: float) -> dict:
    """Hidden axes over a diagram of the given size, y downwards."""
    hidden = {"visible": False, "fixedrange": True}
    return {
        "xaxis": {**hidden, "range": [0, width]},
        "yaxis": {**hidden, "range": [height, 0]},
        "showlegend": False,
        "margin": {"l": 12, "r": 12, "t": 76, "b": 12},
        "hovermode": "closest",
    }


def _outlines(fill: Fill, boxes: list[Box]) -> dict:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for box in boxes:
        right, bottom = box.x + box.width, box.y + box.height
        xs += [box.x, right, right, box.x, box.x, None]
        ys += [box.y, box.y, bottom, bottom, box.y, None]
    pattern = {
        "fillpattern": {
            "shape": fill.pattern,
            "bgcolor": fill.colour,
            "fgcolor": INK,
            "fgopacity": 0.3,
            "size": 9,
            "solidity": 0.15,
        }
    }
    return {
        "type": "scatter", "mode": "lines", "x": xs, "y": ys, "fill": "toself", "fillcolor": fill.colour,
        "line": {"color": INK, "width": 1}, "hoverinfo": "skip", "showlegend": False, **(pattern if fill.pattern else {}),
    }  # fmt: skip


def _words(boxes: list[Box], text_size: int) -> dict:
    return {
        "type": "scatter",
        # An invisible marker, for the pointer to find.
        "mode": "markers+text",
        "marker": {"size": 22, "opacity": 0},
        "x": [box.x + box.width / 2 for box in boxes],
        "y": [box.y + box.height / 2 for box in boxes],
        "text": [box.text for box in boxes],
        "textfont": {"size": text_size, "color": [box.fill.text for box in boxes]},
        "textposition": "middle center",
        "customdata": [box.hover or box.text for box in boxes],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": False,
    }
