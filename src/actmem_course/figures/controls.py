"""What a reader can change, as plain data, and how a change moves the figures.

A control offers only values that can be drawn: where these depend on other controls, the values are a function of the
controls before it.
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
    """One thing that a reader can change.

    Attributes:
        label: The words next to it.
        values: What it offers, or a function that returns that; the names of the function's arguments are those of
            earlier controls.
        start: The value that it begins with.
        look: RANGE, STOPS_ONLY, BUTTONS or PLAY.
    """

    label: str
    values: Sequence | Callable[..., Sequence]
    start: Any
    look: str

    def options(self, before: Mapping[str, Any]) -> list:
        """Return the values on offer.

        Args:
            before: The values of the controls before it, by name.
        """
        if not callable(self.values):
            return list(self.values)
        return list(self.values(*(before[name] for name in inspect.signature(self.values).parameters)))


def slider(letter: str, meaning: str, smallest: int, largest: int, step: int, start: int) -> Control:
    """Make a slider over whole numbers, labelled ``s: tokens``. Arrow keys move it by ``step``."""
    return Control(f"{letter}: {meaning}", range(smallest, largest + 1, step), start, RANGE)


def steps(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """Make a slider that stops at ``values`` only; arrow keys move it one stop."""
    return Control(f"{letter}: {meaning}", values, start, STOPS_ONLY)


def play(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """Make a slider with a button that moves it by itself, one stop after the other."""
    return Control(f"{letter}: {meaning}", values, start, PLAY)


def choice(meaning: str, names: Sequence, start: Any) -> Control:
    """Make a button for each name, of which one is pressed."""
    return Control(meaning, list(names), start, BUTTONS)


def fitted(controls: Mapping[str, Control], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each control the value on offer that is nearest to the one wanted."""
    values: dict[str, Any] = {}
    for name, control in controls.items():
        options = control.options(values)
        want = wanted[name]
        values[name] = want if want in options else min(options, key=lambda option: abs(option - want))
    return values


def shown_value(value: object) -> str:
    """Return a value as shown next to its slider: ``12,288``."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Moves:
    """The state of controls and of the figures that they change.

    When a control moves, those after it offer what fits its value, and stay as near as they can to where the reader put
    them.

    Args:
        draw: Takes the controls' values by name and returns a Drawing, or several.
        controls: By the names of draw's arguments.

    Attributes:
        values: The controls' present values.
        drawings: What is on screen.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], controls: Mapping[str, Control]):
        self._draw, self.controls = draw, controls
        self._wanted = {name: control.start for name, control in controls.items()}
        self.drawings: list[Drawing] = []
        self.values = self._drawn_values = fitted(controls, self._wanted)
        self.drawings = self.drawn(self.values)

    def options(self, name: str) -> list:
        """Return what a control offers, given the others' present values."""
        return self.controls[name].options(self.values)

    def drawn(self, values: Mapping[str, Any]) -> list[Drawing]:
        """Draw the figures for these values, on the axes of the figures on screen where that is possible."""
        drawn = self._draw(**values)
        drawings = [drawn] if isinstance(drawn, Drawing) else list(drawn)
        return [after(*pair) for pair in zip(self.drawings, drawings, strict=True)] if self.drawings else drawings

    def move(self, name: str, value: Any) -> str:
        """Set a control to a value and draw again.

        Returns: "" if ``drawings`` are new; else the reason why the values can't be drawn.
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
    """Return ``drawing`` as it looks when it replaces ``previous``: on the same axis, unless its bars get too short.

    It is unchanged if either has no Axis.
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
