"""What a reader can change, as plain data, and what a change does to the figures.

A control offers only values that can be drawn: where they depend on other controls, they are a function of those
before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actmem.config import ConfigError
from actmem_course.figures.marks import Axis, Drawing

#: How a control looks: a slider over evenly spaced numbers, one that stops at given values, buttons, a checkbox, a
#: slider that plays.
RANGE, STOPS_ONLY, BUTTONS, PLAY = ("range", "stops", "buttons", "play")


@dataclass(frozen=True)
class Control:
    """One thing that a reader can change.

    Attributes:
        label: Its words.
        values: What it offers, or a function that returns it; the function's arguments name earlier controls.
        start: The value that it begins with.
        look: RANGE, STOPS_ONLY, BUTTONS or PLAY.
    """

    label: str
    values: Sequence | Callable[..., Sequence]
    start: Any
    look: str

    def options(self, before: Mapping[str, Any]) -> list:
        """The values on offer, given those of the controls before it, by name."""
        if not callable(self.values):
            return list(self.values)
        return list(self.values(*(before[name] for name in inspect.signature(self.values).parameters)))


def slider(letter: str, meaning: str, smallest: int, largest: int, step: int, start: int) -> Control:
    """A slider over whole numbers, labelled ``s: tokens``.  Arrow keys move it by ``step``."""
    return Control(f"{letter}: {meaning}", range(smallest, largest + 1, step), start, RANGE)


def steps(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """A slider that stops at ``values`` only; arrow keys move it one stop."""
    return Control(f"{letter}: {meaning}", values, start, STOPS_ONLY)


def play(letter: str, meaning: str, values: Sequence[int] | Callable[..., Sequence[int]], start: int) -> Control:
    """A slider with a button that moves it on by itself, one stop after the other."""
    return Control(f"{letter}: {meaning}", values, start, PLAY)


def choice(meaning: str, names: Sequence, start: Any) -> Control:
    """A button for each name, of which one is pressed."""
    return Control(meaning, list(names), start, BUTTONS)


def fitted(controls: Mapping[str, Control], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """For each control the value on offer that is nearest to the one wanted."""
    found: dict[str, Any] = {}
    for name, control in controls.items():
        options = control.options(found)
        want = wanted[name]
        found[name] = want if want in options else min(options, key=lambda option: abs(option - want))
    return found


def shown_value(value: object) -> str:
    """A value next to its slider: ``12,288``."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Moves:
    """The state of controls and of the figures that they change.

    draw: takes the controls' values by name and returns a Drawing, or several.  controls: by the name of draw's
    argument.  When one moves, those after it offer what fits it, and stay as near as they can to where the
    reader put them.  values: what the controls say; drawings: what is on screen.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], controls: Mapping[str, Control]):
        self._draw, self.controls = draw, controls
        self._wanted = {name: control.start for name, control in controls.items()}
        self.drawings: list[Drawing] = []
        self.values = self._drawn_values = fitted(controls, self._wanted)
        self.drawings = self.drawn(self.values)

    def options(self, name: str) -> list:
        """What a control offers beside the others' values."""
        return self.controls[name].options(self.values)

    def drawn(self, values: Mapping[str, Any]) -> list[Drawing]:
        """What values look like in place of what is shown, whose axes stay if they can."""
        drawn = self._draw(**values)
        drawings = [drawn] if isinstance(drawn, Drawing) else list(drawn)
        return [after(*pair) for pair in zip(self.drawings, drawings, strict=True)] if self.drawings else drawings

    def move(self, name: str, value: Any) -> str:
        """Put a control to a value.  Returns why it can't be drawn, or nothing; then ``drawings`` are new."""
        self._wanted = {**self._wanted, name: value}
        self.values = fitted(self.controls, self._wanted)
        try:
            self.drawings = self.drawn(self.values)
        except ConfigError as error:
            still = " ".join(f"{name}={shown_value(value)}" for name, value in self._drawn_values.items())
            return f"✗ {error}. Still drawn: {still}"
        self._drawn_values = self.values
        return ""


#: Below this share of a kept axis bars would be too short to read.
_SHORTEST = 1 / 6


def after(previous: Drawing, drawing: Drawing) -> Drawing:
    """``drawing`` as it looks when it takes the place of ``previous``; unchanged if either names no axis."""
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
