"""One look for all figures: colours and patterns by kind of tensor, sizes, units.

Figures have a white card as background, so that they look the same on a light and on a dark page. On white the strong
colours have a contrast of 3:1; the pale ones are fills with a dark outline. Every kind has a pattern as well: colour is
never the only sign.
"""

import json
from dataclasses import dataclass
from importlib import resources

from actmem_course.others import table_rows

BLUE, VERMILION, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
#: Colours for fills with an outline; they are too pale for lines and text on white.
ORANGE, SKY = "#E69F00", "#56B4E9"
INK, CARD, WARNING = "#222222", "#FFFFFF", "#A4262C"


@dataclass(frozen=True)
class Fill:
    """How an area is filled.

    Attributes:
        colour: The area's colour, such as "#0072B2".
        pattern: plotly's name of the pattern on it, such as "/"; "" for none.
        text: The colour of text on it.
    """

    colour: str
    pattern: str
    text: str = BLACK

    @property
    def edge(self) -> str:
        """A dark shade of the colour, for outlines of boxes that may be a few pixels wide."""
        parts = (int(self.colour[place : place + 2], 16) // 2 for place in (1, 3, 5))
        return "#" + "".join(f"{part:02X}" for part in parts)

    def texture(self) -> dict:
        """Return the pattern as a dict of plotly's properties of patterns; an empty dict if there is no pattern."""
        look = {"shape": self.pattern, "fgcolor": INK, "fgopacity": 0.3, "size": 9, "solidity": 0.15}
        return look if self.pattern else {}

    def marker(self) -> dict:
        """Return colour, dark outline and pattern as plotly's property ``marker`` of bars."""
        pattern = {"pattern": {"fillmode": "overlay", **self.texture()}} if self.pattern else {}
        return {"color": self.colour, "line": {"color": INK, "width": 1}, **pattern}


#: The fill of each thing in every figure of the course: of kinds of tensor, of what fills a GPU, of passes, of what
#: is compared. Each has a pattern or a brightness of its own as well. GeLU's input looks like the tensors that are
#: in its place in other MLPs.
FILLS = {line.pop("what"): Fill(**line) for line in table_rows("fills.tsv", __package__)}
#: Colours of lines, the same as of areas: for what is held, and for what it is compared with.
HELD, COMPARED = GREEN, "#767676"

#: What all figures share, as plotly has it.  The title's distance is in pixels: as a share of the height it would cut
#: off two lines in low figures.  Dragging does nothing, because readers who drag want to scroll.
TEMPLATE = json.loads(resources.files(__package__).joinpath("template.json").read_text(encoding="utf-8"))
CONFIG = {"displayModeBar": False, "scrollZoom": False, "doubleClick": False}
