"""A drawing: what plotly.js draws, and a sentence for readers who cannot see it.

A function that draws takes rows or sizes and returns a Drawing; it changes nothing and
displays nothing.  Moving a slider calls it again, and the figure on screen changes in place.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from actmem_course.show.style import CONFIG, TEMPLATE


@dataclass(frozen=True)
class Axis:
    """The axis along which bars grow from 0 to ``end``; unit: bytes, or what else is counted, in one step of it."""

    title: str
    end: float
    unit: float = 1
    along: str = "x"


@dataclass(frozen=True)
class Drawing:
    """traces and layout as plotly.js takes them; alt: the finding in words, with its numbers.

    axis: of a chart of bars, what a slider should leave in place; None where the axis is always the same.

    Plain dicts and lists, because plotly's Python classes check every property each time, which
    would slow a slider down; the tests check each drawing with them instead.
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
