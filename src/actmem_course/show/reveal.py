"""A guess before the figure that answers it."""

from __future__ import annotations

import ipywidgets

from actmem_course.show.live import LiveFigure, mime_bundle
from actmem_course.show.panel import Panel
from actmem_course.show.predict import Prediction


class Reveal(ipywidgets.VBox):
    """The question, and below it a figure that stays hidden until there is a guess, or "show me" is pressed.

    What is stored of it is the question alone: a picture would give the answer away.
    """

    def __init__(self, prediction: Prediction, figure: Panel | LiveFigure):
        self.prediction, self.figure = prediction, figure
        super().__init__([prediction, figure])
        self.layout.width = "100%"
        figure.layout.display = "none"
        prediction.observe(self._show, "tries")

    def _show(self, change: object) -> None:
        if self.prediction.answered:
            self.figure.layout.display = ""

    def __repr__(self) -> str:
        return repr(self.prediction)

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        return mime_bundle(self, repr(self), [])
