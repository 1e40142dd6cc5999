"""One look for all figures: colours and patterns by kind of tensor, sizes, units.

Figures have a white card as background, so that they look the same on a light and on a dark
page.  On white the strong colours keep a contrast of 3:1; the pale ones are fills with a dark
outline.  Every kind has a pattern as well: colour is never the only sign.
"""

from __future__ import annotations

from dataclasses import dataclass

BLUE, VERMILION, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
#: Too pale for lines and text on white; for fills with an outline.
ORANGE, SKY, YELLOW = "#E69F00", "#56B4E9", "#F0E442"
INK, GRID, CARD, WARNING = "#222222", "#DDDDDD", "#FFFFFF", "#A4262C"


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


#: What a colour means, in every figure of the course.  Each has a pattern or a brightness of its own as well.
FILLS = {
    # A tensor that a layer saves for backward, by its kind.
    "layer-norm input": Fill("#444444", "", CARD),
    "input of a linear": Fill(BLUE, "", CARD),
    "Q, K, V": Fill(SKY, "-"),
    "softmax": Fill(VERMILION, "/"),
    "dropout mask": Fill(YELLOW, "."),
    "GeLU input": Fill(ORANGE, "x"),  # and what stands there in other MLPs: gate and up, experts
    "latents": Fill("#A6E1F0", "|"),  # what Q, K and V are made from, where that is narrower
    "routing": Fill("#7FCDBB", "\\"),  # which tokens go to which experts
    "extra": Fill("#BBBBBB", "+"),
    # What fills a GPU.
    "activations": Fill(GREEN, ""),  # all together, or what the figure doesn't tell apart
    "weights": Fill(PURPLE, "."),
    "gradients": Fill("#EBD0DF", ""),
    "optimizer states": Fill("#8C4A6E", "", CARD),
    "logits and loss": Fill("#F3C3A0", ""),  # paler than their softmax
    "communication buffers": Fill(SKY, ""),
    "transient": Fill("#DDDDDD", "x"),
    "freed": Fill(CARD, "."),
    # A pass of a step, in charts of time.
    "forward": Fill(BLUE, "", CARD),
    "backward": Fill(ORANGE, "x"),
    # What is recomputed, tensors and passes alike.
    "recomputed": Fill(CARD, "/"),
    # The paper's method beside what it is compared with, and other numbers that stand beside each other.
    "ours": Fill(GREEN, ""),
    "others": Fill("#BBBBBB", ""),
    "number": Fill("#5B7083", "", CARD),
    "second number": Fill("#C3CFD9", "/"),
    "third number": Fill("#E8EDF1", "."),
}
#: Lines have the colours of the areas: what is held, what it is compared with.
HELD, COMPARED = GREEN, "#767676"

_AXIS = {"gridcolor": GRID, "linecolor": INK, "zeroline": False, "automargin": True, "title": {"font": {"size": 14}}}
TEMPLATE = {
    "layout": {
        "font": {"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 14, "color": INK},
        "paper_bgcolor": CARD,
        "plot_bgcolor": CARD,
        "colorway": [BLUE, VERMILION, GREEN, PURPLE, BLACK],
        # A distance in pixels: a share of the height would cut off two lines in low figures.
        "title": {
            "x": 0, "xref": "container", "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top",
            "pad": {"l": 12, "t": 24}, "font": {"size": 17},
        },
        "margin": {"l": 60, "r": 24, "t": 76, "b": 104},
        "hoverlabel": {"bgcolor": CARD, "bordercolor": INK, "font": {"size": 13, "color": INK}, "align": "left"},
        # At the bottom of the card, where there is room for a second line.
        "legend": {
            "orientation": "h", "xref": "container", "x": 0.01, "xanchor": "left", "yref": "container", "y": 0.01,
            "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False, "itemwidth": 40,
        },
        "xaxis": {**_AXIS, "separatethousands": True, "ticks": "outside"},
        "yaxis": {**_AXIS, "ticks": "", "ticksuffix": " "},
        # Who drags on a figure wants to scroll; sliders change it.
        "dragmode": False,
    }
}  # fmt: skip

CONFIG = {"displayModeBar": False, "scrollZoom": False, "doubleClick": False}
