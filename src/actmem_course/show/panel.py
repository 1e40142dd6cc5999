"""Sliders that change figures in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets

from actmem.config import ConfigError
from actmem_course.show.drawing import Drawing
from actmem_course.show.line import Line
from actmem_course.show.live import LiveFigure, mime_bundle


def slider(letter: str, meaning: str, smallest: int, largest: int, step: int, start: int) -> ipywidgets.IntSlider:
    """A slider over whole numbers, labelled ``s: tokens``.  Arrow keys move it by ``step``."""
    return ipywidgets.IntSlider(
        value=start,
        min=smallest,
        max=largest,
        step=step,
        description=f"{letter}: {meaning}",
        continuous_update=True,
        readout_format=",d",
        style={"description_width": "11em"},
        layout={"width": "min(100%, 42em)"},
    )


class Panel(ipywidgets.VBox):
    """Controls above the figures that they change.

    draw: takes the controls' values by name and returns a Drawing, or several.  If it raises
    ConfigError the panel shows the message in a line, and the figures stay as they were.
    controls: ipywidgets with a ``value``, by the name of draw's argument.
    """

    def __init__(self, draw: Callable[..., Drawing | Sequence[Drawing]], **controls: ipywidgets.ValueWidget):
        self._draw = draw
        self.controls = controls
        self.message = Line()
        self.shown = self.values()
        self.figures = [LiveFigure(drawing) for drawing in self._drawings(self.shown)]
        super().__init__([*controls.values(), self.message, *self.figures])
        self.layout.width = "100%"
        self.add_class("actmem-panel")
        for control in controls.values():
            control.observe(self._redraw, "value")

    def values(self) -> dict:
        """The controls' values, by name."""
        return {name: control.value for name, control in self.controls.items()}

    def _drawings(self, values: dict) -> list[Drawing]:
        drawn = self._draw(**values)
        return [drawn] if isinstance(drawn, Drawing) else list(drawn)

    def _redraw(self, change: object) -> None:
        values = self.values()
        try:
            drawings = self._drawings(values)
        except ConfigError as error:
            still = " ".join(
                f"{name}={value:,}" if isinstance(value, int) else f"{name}={value}"
                for name, value in self.shown.items()
            )
            self.message.text = f"✗ {error}. Still drawn: {still}"
            return
        self.message.text, self.shown = "", values
        for figure, drawing in zip(self.figures, drawings, strict=True):
            figure.draw(drawing)

    def __repr__(self) -> str:
        sliders = ", ".join(f"{control.description} = {control.value}" for control in self.controls.values())
        return "\n".join([f"Sliders: {sliders}", *(repr(figure) for figure in self.figures)])

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        return mime_bundle(self, repr(self), [figure.drawing for figure in self.figures])
