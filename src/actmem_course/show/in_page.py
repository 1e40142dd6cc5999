"""Figures on a page of the site: the code of a chapter's cell, run by the Python in the page.

The page has no ipywidgets, no plotly and no numpy: a cell's last line, which displays a widget in a notebook,
makes one of the plain objects below instead.  What goes to the page and what comes from it is JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmem_course.show.controls import Control, Moves, judged, shown_value
from actmem_course.show.marks import Drawing


@dataclass
class Question:
    """What ``Prediction`` asks.  The answer reaches the page with a guess only."""

    question: str
    answer: float
    unit: str = ""
    because: str = ""


@dataclass
class LiveCell:
    """A figure, or figures with controls; with a question before them, they come with its answer."""

    moves: Moves
    question: Question | None = None
    answered: bool = False

    def state(self) -> dict:
        """Controls with what they offer, the drawings, and the question."""
        moves, hidden = self.moves, self.question is not None and not self.answered
        return {
            "controls": {} if hidden else {name: _offered(moves, name) for name in moves.controls},
            "drawings": [] if hidden else [{**drawing.spec(), "alt": drawing.alt} for drawing in moves.drawings],
            "question": None if self.question is None else {"text": self.question.question, "unit": self.question.unit},
        }

    def guess(self, guess: str) -> dict:
        """The answer to a guess, and with it the state."""
        assert self.question is not None
        said = judged(guess, self.question.answer, self.question.unit, self.question.because)
        self.answered = self.answered or not said.refused
        return {**self.state(), "reply": said.reply, "refused": said.refused}

    def move(self, name: str, place: int) -> dict:
        """The state after a control was put to the option at ``place``; ``message`` says why it can't be drawn."""
        message = self.moves.move(name, self.moves.options(name)[place])
        return {**self.state(), "message": message}


def _offered(moves: Moves, name: str) -> dict:
    control, options = moves.controls[name], moves.options(name)
    return {
        "label": control.label,
        "look": control.look,
        "options": [shown_value(option) for option in options],
        "place": options.index(moves.values[name]),
    }


def _panel(draw: Callable[..., Drawing | Sequence[Drawing]], **controls: Control) -> LiveCell:
    return LiveCell(Moves(draw, controls))


def _figure(drawing: Drawing) -> LiveCell:
    return LiveCell(Moves(lambda: drawing, {}))


def _reveal(question: Question, figure: LiveCell) -> LiveCell:
    return LiveCell(figure.moves, question)


#: What the names of the widgets stand for in a page.
IN_PAGE: Mapping[str, Callable[..., Any]] = {
    "Panel": _panel,
    "LiveFigure": _figure,
    "Prediction": Question,
    "Reveal": _reveal,
}


def run_cell(code: str) -> LiveCell:
    """Run a cell whose last line makes a figure, and return that."""
    *before, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = dict(IN_PAGE)
    exec(compile(ast.Module(before, []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


class Page:
    """The figures of a page, by the names of their cells.  Made when they are first asked for."""

    def __init__(self, cells: str):
        self._cells: dict[str, str] = json.loads(cells)
        self._shown: dict[str, LiveCell] = {}

    def shown(self, cell: str) -> LiveCell:
        if cell not in self._shown:
            self._shown[cell] = run_cell(self._cells[cell])
        return self._shown[cell]

    def ask(self, message: str) -> str:
        """Answer one message of the page: ``{"cell": …}`` with a control's name and place, or a guess."""
        asked = json.loads(message)
        shown = self.shown(asked["cell"])
        if "guess" in asked:
            return json.dumps(shown.guess(asked["guess"]))
        if "control" in asked:
            return json.dumps(shown.move(asked["control"], asked["place"]))
        return json.dumps(shown.state())
