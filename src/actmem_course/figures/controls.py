"""Sliders and buttons as plain data, and how a figure is redrawn when the reader moves one.

A control offers only values that can be drawn. If these depend on other controls, its values are a function of the
controls above it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actmem.config import ConfigError
from actmem_course.figures.marks import Axis, Drawing

#: How a control looks: a slider over evenly spaced numbers, a slider that stops at given values, buttons, a slider that
#: moves by itself.
RANGE, STOPS_ONLY, BUTTONS, PLAY = ("range", "stops", "buttons", "play")


@dataclass(frozen=True)
class Control:
    """A slider or a row of buttons.

    Attributes:
        label: The text next to the control.
        values: The values to choose from; or a function that returns these values. The function's arguments have the
            names of controls above this one, and get the values of those controls.
        start: The value that the control has at first.
        look: RANGE (a slider over evenly spaced numbers), STOPS_ONLY (one that stops at ``values``), BUTTONS, or PLAY
            (a slider that can move by itself).
    """

    label: str
    values: Sequence | Callable[..., Sequence]
    start: Any
    look: str

    def options(self, before: Mapping[str, Any]) -> list:
        """Return the values to choose from.

        Args:
            before: The values of the controls above this one, by the control's name.
        """
        if not callable(self.values):
            return list(self.values)
        return list(self.values(*(before[name] for name in inspect.signature(self.values).parameters)))


def slider(letter: str, meaning: str, smallest: int, largest: int, step: int, start: int) -> Control:
    """Make a slider over whole numbers. Arrow keys move it by ``step``.

    Args:
        letter: The first part of the label, such as "s".
        meaning: The second part of the label, such as "tokens".
        smallest: The slider's smallest value.
        largest: The slider's largest value.
        step: The distance between two values.
        start: The value that the slider has at first.
    """
    return Control(f"{letter}: {meaning}", range(smallest, largest + 1, step), start, RANGE)


def steps(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """Make a slider that stops at some values only. Arrow keys move it from one value to the next.

    Args:
        letter: The first part of the label, such as "t".
        meaning: The second part of the label, such as "ranks".
        values: The values; or a function that returns them, whose arguments are named as controls above this one.
        start: The value that the slider has at first.
    """
    return Control(f"{letter}: {meaning}", values, start, STOPS_ONLY)


def play(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """Make a slider with a button that plays it: the slider then moves by itself from one value to the next.

    Args:
        letter: The first part of the label, such as "step".
        meaning: The second part of the label, such as "of the ring".
        values: The values; or a function that returns them, whose arguments are named as controls above this one.
        start: The value that the slider has at first.
    """
    return Control(f"{letter}: {meaning}", values, start, PLAY)


def choice(meaning: str, names: Sequence, start: Any) -> Control:
    """Make a row of buttons of which one is selected.

    Args:
        meaning: The label, such as "recomputation".
        names: The values, one for each button, with the value as its text.
        start: The value that is selected at first.
    """
    return Control(meaning, list(names), start, BUTTONS)


def fitted(controls: Mapping[str, Control], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Choose a value of each control: the wanted value, or else the nearest value that the control offers.

    Args:
        controls: The controls by name, from the top; what a control offers may depend on the values of those above it.
        wanted: The value that each control should have, by the control's name.

    Returns: the values chosen, by the control's name.
    """
    values: dict[str, Any] = {}
    for name, control in controls.items():
        options = control.options(values)
        want = wanted[name]
        values[name] = want if want in options else min(options, key=lambda option: abs(option - want))
    return values


def shown_value(value: object) -> str:
    """Return a control's value as the text next to its slider: ``12,288``."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Moves:
    """The current values of a cell's controls, and the figures drawn for them.

    When a control moves, the controls below it may have to offer other values. Each of these controls then takes the
    value nearest to the value that the reader had chosen.

    Args:
        draw: A function that takes the controls' values by name and returns a Drawing, or a sequence of Drawings.
        controls: The controls, by the names of draw's arguments.

    Attributes:
        values: The controls' current values.
        drawings: The figures on screen.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], controls: Mapping[str, Control]):
        self._draw, self.controls = draw, controls
        self._wanted = {name: control.start for name, control in controls.items()}
        self.drawings: list[Drawing] = []
        self.values = self._drawn_values = fitted(controls, self._wanted)
        self.drawings = self.drawn(self.values)

    def options(self, name: str) -> list:
        """Return the values that a control offers now, given the current values of the controls above it.

        Args:
            name: The control's name.
        """
        return self.controls[name].options(self.values)

    def drawn(self, values: Mapping[str, Any]) -> list[Drawing]:
        """Draw the figures for some values; where possible they keep the axes of the figures on screen.

        Args:
            values: The controls' values, by the control's name.
        """
        drawn = self._draw(**values)
        drawings = [drawn] if isinstance(drawn, Drawing) else list(drawn)
        return [after(*pair) for pair in zip(self.drawings, drawings, strict=True)] if self.drawings else drawings

    def move(self, name: str, value: Any) -> str:
        """Set a control to a value and draw the figures again.

        Args:
            name: The control's name.
            value: One of the values that the control offers; for another number the nearest of them is taken.

        Returns: "" if the figures were drawn; else a text that says why they can't be drawn for this value. The old
            figures then stay.
        """
        self._wanted = {**self._wanted, name: value}
        self.values = fitted(self.controls, self._wanted)
        try:
            self.drawings = self.drawn(self.values)
        except ConfigError as error:
            still = " ".join(f"{name}={shown_value(value)}" for name, value in self._drawn_values.items())
            return f"✗ {error}. Still drawn: {still}"
        self._drawn_values = self.values
        return ""


#: An axis stays while the longest bar takes at least this share of it; shorter bars would be hard to read.
_SHORTEST = 1 / 6


def after(previous: Drawing, drawing: Drawing) -> Drawing:
    """Give a new drawing the axis of the one that it replaces, so that its bars can be compared with the old ones.

    Args:
        previous: The drawing on screen.
        drawing: The new drawing, which replaces it.

    Returns: the new drawing on the axis of ``previous``. It is ``drawing`` unchanged if its bars would be too short or
        too long on that axis, or if one of the two drawings has no Axis.
    """
    if previous.axis is None or drawing.axis is None:
        return drawing
    need, kept = drawing.axis.end * drawing.axis.unit, previous.axis.end * previous.axis.unit
    stays = _SHORTEST * kept <= need <= kept
    # Its words may name sizes, which are the new ones.
    axis = replace(previous.axis, words=drawing.axis.words) if stays else drawing.axis
    return drawing if axis == drawing.axis else _on_axis(drawing, axis)


def _on_axis(drawing: Drawing, axis: Axis) -> Drawing:
    assert drawing.axis is not None
    factor = drawing.axis.unit / axis.unit
    traces = [
        {**trace, "x": [value if value is None else value * factor for value in trace["x"]]} for trace in drawing.traces
    ]
    notes = [{**note, "x": note["x"] * factor} for note in drawing.layout.get("annotations", ())]
    shown = {**drawing.layout["xaxis"], "title": {"text": axis.title}, "range": [0, axis.end]}
    return replace(drawing, traces=traces, layout={**drawing.layout, "xaxis": shown, "annotations": notes}, axis=axis)
