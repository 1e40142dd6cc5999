"""One look for all figures: colours and patterns by kind of tensor, sizes, units.

Figures have a white card as background, so that they look the same on a light and on a dark
page.  On white the strong colours keep a contrast of 3:1; the pale ones are fills with a dark
outline.  Every kind has a pattern as well: colour is never the only sign.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from actmem_course.others import table_rows

BLUE, VERMILION, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
#: Too pale for lines and text on white; for fills with an outline.
ORANGE, SKY = "#E69F00", "#56B4E9"
INK, CARD, WARNING = "#222222", "#FFFFFF", "#A4262C"


@dataclass(frozen=True)
class Fill:
    """How an area is filled: its colour, the pattern on it, the colour of text on it."""

    colour: str
    pattern: str
    text: str = BLACK

    @property
    def edge(self) -> str:
        """A dark shade of the colour, for outlines of boxes that may be a few pixels wide."""
        parts = (int(self.colour[place : place + 2], 16) // 2 for place in (1, 3, 5))
        return "#" + "".join(f"{part:02X}" for part in parts)

    def texture(self) -> dict:
        """The pattern as plotly has it; empty where there is none."""
        look = {"shape": self.pattern, "fgcolor": INK, "fgopacity": 0.3, "size": 9, "solidity": 0.15}
        return look if self.pattern else {}

    def marker(self) -> dict:
        """For a plotly trace: colour, dark outline, pattern."""
        pattern = {"pattern": {"fillmode": "overlay", **self.texture()}} if self.pattern else {}
        return {"color": self.colour, "line": {"color": INK, "width": 1}, **pattern}


#: What a colour means, in every figure of the course: what a tensor is, what fills a GPU, a pass, what is compared.
#: Each has a pattern or a brightness of its own as well.  GeLU's input has the look of what stands there in other MLPs.
FILLS = {line.pop("what"): Fill(**line) for line in table_rows("fills.tsv", __package__)}
#: Lines have the colours of the areas: what is held, what it is compared with.
HELD, COMPARED = GREEN, "#767676"

#: What all figures share, as plotly has it.  The title stands at a distance in pixels: a share of the height would cut
#: off two lines in low figures.  Whoever drags on a figure wants to scroll; sliders change it.
TEMPLATE = json.loads(resources.files(__package__).joinpath("template.json").read_text(encoding="utf-8"))
CONFIG = {"displayModeBar": False, "scrollZoom": False, "doubleClick": False}
