"""Drawing: figures, controls and checks, made from rows and results. Needs neither torch nor numpy.

The names below are what a chapter uses besides its own figures, which are in a file with the chapter's name
(``ch05_recomputation``). Each loads its module when it is first asked for.
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
