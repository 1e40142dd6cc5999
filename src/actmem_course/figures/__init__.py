"""Figures, sliders and checks of the notebooks, drawn from predicted or measured rows. Needs neither torch nor numpy.

Each chapter's figures are in a file with its number (``ch05_recomputation``). This module has the names that all
chapters use, such as ``slider`` and ``Checks``. Each is imported from its module when it is first used.
"""

from importlib import import_module
from typing import Any

#: The module in which each name is.
_HOMES = {
    "in_page": ("LiveFigure", "Panel", "Prediction", "Reveal"),
    "controls": ("choice", "play", "slider", "steps"),
    "bars": ("bar_chart",),
    "marks": ("GuessLine",),
    "checks": ("Checks", "Fold", "worked"),
    "units": ("size_text",),
    "text": ("extras_text", "saved_text", "speed_facts", "text_table"),
    "widgets": ("Progress", "Varies"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"actmem_course.figures.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
