"""Figures on a page of the site: the code of a chapter's cell, run by the Python in the page.

The page has no ipywidgets, no plotly and no numpy: a cell's last line, which displays a widget in a notebook,
makes one of the plain objects below instead.  What goes to the page and what comes from it is JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from actmem_course.show.controls import SHOW_ME, Control, Moves, judged, shown_value
from actmem_course.show.marks import Drawing, GuessLine


@dataclass
class Question:
    """What ``Prediction`` asks."""

    question: str
    answer: float
    unit: str = ""
    because: str = ""
    line: GuessLine | None = None


@dataclass
class LiveCell:
    """A figure, or figures with controls, and a question about them; ``shows``: the controls that show its answer."""

    moves: Moves
    question: Question | None = None
    shows: Mapping[str, Any] = field(default_factory=dict)

    def state(self) -> dict:
        """Controls with what they offer, the drawings, and the question."""
        moves = self.moves
        return {
            "controls": {name: _offered(moves, name) for name in moves.controls},
            "drawings": [{**drawing.spec(), "alt": drawing.alt} for drawing in moves.drawings],
            "question": None if self.question is None else {"text": self.question.question, "unit": self.question.unit},
        }

    def answer(self) -> dict:
        """The state that shows the answer.  The page stores it, with what it says to a guess, and waits for no Python."""
        asked = self.question
        assert asked is not None
        for name, value in self.shows.items():
            self.moves.move(name, value)
        said = {"number": asked.answer, "reply": judged(SHOW_ME, asked.answer, asked.unit, asked.because).reply}
        if asked.line is None:
            return {**self.state(), **said}
        drawing = self.moves.drawings[asked.line.figure]
        shape = drawing.marked(asked.line, asked.answer).layout["shapes"][-1]
        unit = drawing.axis.unit if drawing.axis else 1
        return {**self.state(), **said, "line": {**asdict(asked.line), "unit": unit, "shape": shape}}

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


def _reveal(question: Question, figure: LiveCell, **shows: Any) -> LiveCell:
    return LiveCell(figure.moves, question, shows)


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
        """Answer one message of the page: ``{"cell": …}`` with a control's name and place, or that its answer is shown."""
        asked = json.loads(message)
        shown = self.shown(asked["cell"])
        if "answer" in asked:
            return json.dumps(shown.answer())
        if "control" in asked:
            return json.dumps(shown.move(asked["control"], asked["place"]))
        return json.dumps(shown.state())
