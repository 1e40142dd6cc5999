"""The game of chapter 2: for each operation say what backward must keep, before the table says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actmem.config import ModelShape
from actmem.formulas.activations import layer_rows
from actmem.rows import Row, total
from actmem_course.show.choices import Control, choice
from actmem_course.show.drawing import Drawing
from actmem_course.show.layer_drawing import ATTENTION_COLUMN, MLP_COLUMN
from actmem_course.show.style import FILLS, INK, axis_end, axis_unit, size_text
from actmem_course.show.terms import term_of

#: What a player can say of an operation, the first of which is no answer.
NO_ANSWER, INPUT, INPUTS, OUTPUT, MASK, NOTHING = ("?", "its input", "both inputs", "its output", "a mask", "nothing")
ANSWERS = (NO_ANSWER, INPUT, INPUTS, OUTPUT, MASK, NOTHING)
_LINEARS = ("Q, K, V products", "projection", "h→4h", "4h→h")


def operations() -> dict[str, tuple[str, ...]]:
    """The layer's kinds of operation in the order of forward, each with all tensors that the layer keeps for it."""
    found: dict[str, tuple[str, ...]] = {}
    for drawn, terms in (*ATTENTION_COLUMN, *MLP_COLUMN):
        name = drawn.replace("<br>", " ")
        kind = "layer norm" if name.startswith("layer norm") else "linear" if name in _LINEARS else name
        found[kind] = (*found.get(kind, ()), *terms)
    return {("adding the residual" if name == "+ input" else name): terms for name, terms in found.items()}


def kept_by(operation: str) -> str:
    """The right answer, read off the names of the tensors: one of ANSWERS."""
    terms = operations()[operation]
    if not terms:
        return NOTHING
    if any(term.endswith("mask") for term in terms):
        return MASK
    if any(term == f"{operation} output" for term in terms):
        return OUTPUT
    return INPUT if all(term.endswith("input") for term in terms) else INPUTS


def keep_controls() -> dict[str, Control]:
    """A row of buttons for each operation, by a name that ``keep_game`` takes."""
    return {_argument(operation): choice(operation, ANSWERS, NO_ANSWER) for operation in operations()}


def keep_game(shape: ModelShape, **answers: str) -> Drawing:
    """The bytes of each operation that was answered rightly, and the score.

    shape: of the layer.  answers: by the names of ``keep_controls``.
    """
    rows = {row.term: row for row in layer_rows(shape)}
    said = {operation: answers[_argument(operation)] for operation in operations()}
    right = {operation for operation, answer in said.items() if answer == kept_by(operation)}
    tried = [operation for operation, answer in said.items() if answer != NO_ANSWER]
    found = sum(total(_rows(rows, operation)) for operation in right)
    whole = total(rows.values())
    most = max(total(_rows(rows, operation)) for operation in said)
    unit, unit_name = axis_unit(most)
    score = f"{len(right)} of {len(said)} right"
    if len(right) == len(said):
        title = f"{score}: you have found all {size_text(whole)},<br>every byte of equation 1"
    else:
        title = f"{score}: {size_text(found)} of {size_text(whole)} found;<br>{_next(said, right)}"
    return Drawing(
        [_segment(row, operation, unit) for operation in said if operation in right for row in _rows(rows, operation)]
        + [_verdicts(said, right, rows)],
        {
            "title": {"text": title},
            "barmode": "stack",
            "bargap": 0.3,
            "height": 420,
            "showlegend": False,
            "margin": {"l": 130, "b": 56},
            "xaxis": {"title": {"text": f"kept for backward, {unit_name}"}, "range": [0, axis_end(1.5 * most / unit)]},
            "yaxis": {"categoryorder": "array", "categoryarray": list(said)[::-1]},
        },
        f"A bar for each operation that was answered rightly. {score}, {len(tried)} answered; {found:,} of {whole:,} bytes found: "
        + ", ".join(f"{operation} {answer}{_mark(operation, said, right)}" for operation, answer in said.items())
        + ".",
    )


def _argument(operation: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in operation)


def _rows(rows: Mapping[str, Row], operation: str) -> list[Row]:
    return [rows[term] for term in operations()[operation]]


def _mark(operation: str, said: Mapping[str, str], right: set[str]) -> str:
    return "" if said[operation] == NO_ANSWER else " ✓" if operation in right else " ✗"


def _next(said: Mapping[str, str], right: set[str]) -> str:
    wrong = [operation for operation, answer in said.items() if answer != NO_ANSWER and operation not in right]
    if wrong:
        return f"not {said[wrong[0]]} for {wrong[0]}: what does its gradient read?"
    return f"what does {next(operation for operation in said if operation not in right)} keep?"


def _segment(row: Row, operation: str, unit: int) -> dict:
    term = term_of(row)
    return {
        "type": "bar", "orientation": "h", "name": row.term, "x": [row.bytes / unit], "y": [operation], "marker": FILLS[term.kind].marker(),
        "hovertemplate": f"<b>{row.term}</b><br>{row.bytes:,} B = {size_text(row.bytes)}<br>{term.why}<extra></extra>",
    }  # fmt: skip


def _verdicts(said: Mapping[str, str], right: set[str], rows: Mapping[str, Row]) -> dict:
    """Beside each bar its bytes, at the foot of the others what was said.  The stack puts the words after the bar."""
    words: Sequence[str] = [
        f"✓ {answer}, {size_text(total(_rows(rows, operation)))}" if operation in right
        else NO_ANSWER if answer == NO_ANSWER else f"✗ {answer}"
        for operation, answer in said.items()
    ]  # fmt: skip
    return {
        "type": "bar", "orientation": "h", "x": [0] * len(said), "y": list(said), "text": words, "textposition": "outside",
        "textfont": {"size": 13, "color": INK}, "hoverinfo": "skip", "cliponaxis": False,
    }  # fmt: skip
