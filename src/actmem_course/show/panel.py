"""Sliders that change figures in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from actmem_course.show.choices import BUTTONS, PLAY, RANGE, SWITCH, Control, shown_value
from actmem_course.show.drawing import Drawing
from actmem_course.show.line import Line
from actmem_course.show.live import LiveFigure, mime_bundle
from actmem_course.show.moves import Moves

_STYLE, _LAYOUT = {"description_width": "11em"}, {"width": "min(100%, 42em)"}


def widget_of(control: Control, options: list, value: Any) -> ipywidgets.ValueWidget:
    """The widget that offers a control's options."""
    common = {"value": value, "description": control.label, "style": _STYLE, "layout": _LAYOUT}
    if control.look == SWITCH:
        return ipywidgets.Checkbox(**common)
    if control.look == BUTTONS:
        style, layout = {**_STYLE, "button_width": "max-content"}, {"width": "100%"}
        return ipywidgets.ToggleButtons(options=options, **{**common, "style": style, "layout": layout})
    if control.look == RANGE:
        ends = {"min": options[0], "max": options[-1], "step": options[1] - options[0] if options[1:] else 1}
        return ipywidgets.IntSlider(**ends, continuous_update=True, readout_format=",d", **common)
    return ipywidgets.SelectionSlider(options=_named(options), continuous_update=True, **common)


#: Between two stops of a slider that plays.
_INTERVAL_MILLISECONDS = 450


def player(slider: ipywidgets.SelectionSlider) -> ipywidgets.HBox:
    """A slider, and buttons that move it on by themselves."""
    buttons = ipywidgets.Play(min=0, max=len(slider.options) - 1, value=slider.index, interval=_INTERVAL_MILLISECONDS)
    ipywidgets.link((buttons, "value"), (slider, "index"))
    slider.observe(lambda change: setattr(buttons, "max", len(slider.options) - 1), "_options_labels")
    return ipywidgets.HBox([slider, buttons], layout={"width": "100%"})


def _named(options: list) -> list[tuple[str, Any]]:
    return [(shown_value(option), option) for option in options]


class Panel(ipywidgets.VBox):
    """Controls above the figures that they change, by ``Moves``.

    If ``draw`` raises ConfigError the panel shows the message in a line, and the figures stay as they were.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], **controls: Control):
        self.moves = Moves(draw, controls)
        self.controls = {
            name: widget_of(control, self.moves.options(name), self.moves.values[name])
            for name, control in controls.items()
        }
        self.message = Line()
        self.figures = [LiveFigure(drawing) for drawing in self.moves.drawings]
        shown = [player(control) if controls[name].look == PLAY else control for name, control in self.controls.items()]
        super().__init__([*shown, self.message, *self.figures])
        self.layout.width = "100%"
        self.add_class("actmem-panel")
        self._fitting = False
        for name, control in self.controls.items():
            control.observe(lambda change, name=name: self._moved(name, change["new"]), "value")

    def values(self) -> dict:
        """The controls' values, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def _moved(self, name: str, value: Any) -> None:
        if self._fitting:
            return
        self.message.text = self.moves.move(name, value)
        self._fitting = True
        try:
            for other in self.controls:
                self._fit(other)
        finally:
            self._fitting = False
        if not self.message.text:
            for figure, drawing in zip(self.figures, self.moves.drawings, strict=True):
                figure.draw(drawing)

    def _fit(self, name: str) -> None:
        """Let a control offer what fits the ones before it, and stand where it should."""
        control, options = self.controls[name], self.moves.options(name)
        # In one message: with new values and the old place, the page would move the slider by itself.
        with control.hold_sync():
            if callable(self.moves.controls[name].values) and options != [option for _, option in control.options]:
                control.options = _named(options)
            control.value = self.moves.values[name]

    def __repr__(self) -> str:
        sliders = ", ".join(f"{control.description} = {control.value}" for control in self.controls.values())
        return "\n".join([f"Sliders: {sliders}", *(repr(figure) for figure in self.figures)])

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        return mime_bundle(self, repr(self), [figure.drawing for figure in self.figures])
