"""Interactive cells, in a notebook and on a page of the site: figures, their controls, and a question to the reader.

``figures.js`` draws them in both places. It gets the state as JSON, and when a control moves it asks Python for the
next state. On the site that is a Python inside the page, without ipywidgets, plotly or numpy. In a notebook it is the
kernel (``live``).
"""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from actmem_course.figures.controls import Control, Moves, shown_value
from actmem_course.figures.marks import Drawing, GuessLine
from actmem_course.figures.units import three_digits


@dataclass
class Question:
    """Asks a reader for a number before the figure shows it.

    Attributes:
        question: The question, one sentence.
        answer: The right number, in ``unit``.
        unit: The unit of answer and guess, such as "GiB"; "" for none.
        because: The reason, shown with the answer; "" for none.
        line: Where in the figure a line marks the reader's guess; None for no line.
    """

    question: str
    answer: float
    unit: str = ""
    because: str = ""
    line: GuessLine | None = None

    def reply(self) -> str:
        """Return the text with the answer and its reason. After a guess the page adds by how much it was off."""
        number = f"{int(self.answer):,}" if self.answer == int(self.answer) else three_digits(self.answer)
        unit = self.unit if self.unit in ("", "%") else f" {self.unit}"
        return f"It is {number}{unit}." + (f"\n{self.because}" if self.because else "")

    def __repr__(self) -> str:
        return f"Your prediction: {self.question} (run this cell, then write a number; the answer comes after it)"


@dataclass(repr=False)
class LiveCell:
    """The content of an interactive cell.

    Attributes:
        moves: The figures and their controls.
        question: A question about the figures; None for no question.
        shows: The controls' values at which the figures show the answer to the question, by the control's name.
    """

    moves: Moves
    question: Question | None = None
    shows: Mapping[str, Any] = field(default_factory=dict)
    #: Moves that a page asked for before a reader made them, by control and place: the moved figures and the message.
    _ahead: dict[tuple[str, int], tuple[Moves, str]] = field(default_factory=dict, init=False)

    @classmethod
    def panel(cls, draw: Callable[..., Drawing | Sequence[Drawing]], **controls: Control) -> LiveCell:
        """Make a cell with figures below the controls that change them.

        Args:
            draw: A function that takes the controls' values by name and returns a Drawing, or a sequence of Drawings.
                If it raises ConfigError, the error's message is shown and the figures stay as they were.
            controls: The controls, by the names of draw's arguments.
        """
        return cls(Moves(draw, controls))

    @classmethod
    def figure(cls, drawing: Drawing) -> LiveCell:
        """Make a cell with one figure and no controls."""
        return cls(Moves(lambda: drawing, {}))

    @classmethod
    def reveal(cls, question: Question, panel: LiveCell, **shows: Any) -> LiveCell:
        """Make a cell with a question above a panel.

        Args:
            question: The question, with its answer.
            panel: A cell with the figures and controls, from ``panel``.
            shows: For some controls, by name, the value to which each moves when the reader has answered.
        """
        return cls(panel.moves, question, shows)

    def state(self) -> dict:
        """Return the cell's current state as a dict that JSON can hold.

        Returns: a dict with these keys:
            "controls": for each control, by name, its label, look, options and the index of the current option.
            "drawings": for each figure its data, layout and config for plotly.js, and its alt text.
            "question": the question's text and unit; None if there is no question.
        """
        return self._state(self.moves)

    def _state(self, moves: Moves) -> dict:
        return {
            "controls": {name: _offered(moves, name) for name in moves.controls},
            "drawings": [{**drawing.spec(), "alt": drawing.alt} for drawing in moves.drawings],
            "question": None if self.question is None else {"text": self.question.question, "unit": self.question.unit},
        }

    def stored(self) -> dict:
        """Return the states that a page of the site can show while the Python that runs in the browser still loads.

        Returns: a dict with these keys:
            "state": the current state, from the method ``state``.
            "answer": only if there is a question: what the method ``answer`` would return.
        """
        if self.question is None:
            return {"state": self.state()}
        after = copy.copy(self)
        after.moves = copy.copy(self.moves)
        return {"state": self.state(), "answer": after.answer()}

    def answer(self) -> dict:
        """Move the controls to ``shows``, where the figures show the answer, and return the new state.

        Returns:
            The dict of the method ``state``, with two or three keys more: "number", with which a guess is compared;
                "reply", a text with the answer and its reason; and, if ``Question.line`` isn't None, "line", the line
                that marks a guess.
        """
        asked = self.question
        assert asked is not None
        self._ahead = {}
        for name, value in self.shows.items():
            self.moves.move(name, value)
        state = {**self.state(), "number": asked.answer, "reply": asked.reply()}
        if asked.line is None:
            return state
        axis = self.moves.drawings[asked.line.figure].axis
        return {**state, "line": {**asdict(asked.line), "unit": axis.unit if axis else 1, "shape": asked.line.shape()}}

    def next(self, asked: Mapping[str, Any]) -> dict:
        """Return the next state, after the reader has answered or moved a control.

        Args:
            asked: A dict from the page. After an answer it has the key "answer". After a move it has "control", the
                control's name, and "place", the index of the control's new option. If the key "ahead" is true, the
                reader hasn't moved the control yet: the state after that move is returned, and the cell stays as it is.

        Returns:
            The dict of the method ``answer`` or ``state``; after a move it also has the key "message", a text that says
                why the move can't be drawn, or "".
        """
        if "answer" in asked:
            return self.answer()
        name, place = asked["control"], asked["place"]
        if (name, place) not in self._ahead:
            moves = copy.copy(self.moves)
            # A control that moved just before may have left fewer options than the page knew of.
            options = moves.options(name)
            self._ahead[name, place] = moves, moves.move(name, options[min(place, len(options) - 1)])
        moves, message = self._ahead[name, place]
        if not asked.get("ahead"):
            self.moves, self._ahead = moves, {}
        return {**self._state(moves), "message": message}

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        """Return what a notebook displays. Pages never call it, so they need none of the widgets' packages."""
        return import_module("actmem_course.figures.live").widget_bundle(self)

    def __repr__(self) -> str:
        lines = [repr(self.question)] if self.question else []
        at = [f"{control.label} = {self.moves.values[name]}" for name, control in self.moves.controls.items()]
        lines += [f"Sliders: {', '.join(at)}"] if at else []
        return "\n".join(lines + [drawing.alt for drawing in self.moves.drawings])


def _offered(moves: Moves, name: str) -> dict:
    control, options = moves.controls[name], moves.options(name)
    return {
        "label": control.label,
        "look": control.look,
        "options": [shown_value(option) for option in options],
        "place": options.index(moves.values[name]),
    }


#: What chapters call to show something.
Panel, LiveFigure, Reveal, Prediction = LiveCell.panel, LiveCell.figure, LiveCell.reveal, Question
#: The names of these calls.  A cell of nothing else is folded, since a reader came for the figure.
SHOWN = {"Panel", "LiveFigure", "Prediction", "Reveal"}


def run_cell(code: str) -> LiveCell:
    """Run the code of a cell, whose last line makes a LiveCell, and return this LiveCell.

    Args:
        code: The cell's Python code.
    """
    *before, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(ast.Module(before, []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


class Page:
    """The interactive cells of one page of the site, for the Python that runs in the reader's browser.

    A cell's code is run when the page's script first sends a message about it.

    Args:
        cells: A JSON text: the code of each cell, by the cell's name.
    """

    def __init__(self, cells: str):
        self._cells: dict[str, str] = json.loads(cells)
        self._shown: dict[str, LiveCell] = {}

    def ask(self, message: str) -> str:
        """Answer one message of the page.

        Args:
            message: The JSON text of an object. Its key "cell" names the cell. The other keys are those that
                ``LiveCell.next`` takes; or only "ready", with which the cell's code is run and no state is made.

        Returns:
            The JSON text of the next state, or of null after "ready".
        """
        asked = json.loads(message)
        cell = asked["cell"]
        if cell not in self._shown:
            self._shown[cell] = run_cell(self._cells[cell])
        if asked.get("ready"):
            return "null"
        return json.dumps(self._shown[cell].next(asked))
