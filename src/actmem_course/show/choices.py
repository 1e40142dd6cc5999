"""Controls for values other than a range of whole numbers: powers of two, names."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

_LOOK = {"style": {"description_width": "11em"}, "layout": {"width": "min(100%, 42em)"}}


def steps(letter: str, meaning: str, values: Sequence[int], start: int) -> ipywidgets.SelectionSlider:
    """A slider that stops at ``values`` only, labelled like ``panel.slider``; arrow keys move it one stop."""
    return ipywidgets.SelectionSlider(
        options=[(f"{value:,}", value) for value in values],
        value=start,
        description=f"{letter}: {meaning}",
        continuous_update=True,
        **_LOOK,
    )


def choice(meaning: str, names: Sequence[str], start: str) -> ipywidgets.ToggleButtons:
    """A button for each name, of which one is pressed."""
    return ipywidgets.ToggleButtons(
        options=list(names),
        value=start,
        description=meaning,
        style={"description_width": "11em", "button_width": "max-content"},
        layout={"width": "100%"},
    )
