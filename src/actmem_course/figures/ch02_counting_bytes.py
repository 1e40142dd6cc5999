"""Chapter 2: what one layer keeps, as bars, as a drawing of its operations, and as a game of what backward must
keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.rows import LAYER_TERMS, Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.controls import Control, choice
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import STACKED, Axis, Drawing, bars, chart, downwards, legend, line
from actmem_course.figures.style import CARD, FILLS, INK, Fill
from actmem_course.figures.terms import BLOCKS, KINDS, formula_of, term_of
from actmem_course.figures.units import axis_end, axis_unit, exact_text, size_text, three_digits


def segment(row: Row, at: str, shape: ModelShape, unit: int) -> dict:
    """A stored tensor as a part of the bar ``at``, with its formula inside; its reason for who points at it."""
    term, formula = term_of(row), formula_of(row, shape)
    split = f", split by {row.split_by}" if row.split_by > 1 else ""
    hover = f"<b>{row.term}</b>  {formula}{split}<br>{exact_text(row.bytes)}<br>{term.why}"
    return bars(row.term, [at], [row.bytes / unit], FILLS[term.kind], hover, [formula], showlegend=False)


def kinds_legend(rows: Iterable[Row], along: str = "x") -> list[dict]:
    """Entries by kind, whatever the number of segments: an empty trace for each that occurs."""
    present = {term_of(row).kind for row in rows}
    return legend({kind: FILLS[kind] for kind in KINDS if kind in present}, along)


def layer_bars(rows: Sequence[Row], shape: ModelShape) -> Drawing:
    """Stacked bars, one for each block: rows of one layer, from ``layer_rows`` and, if wanted, ``layer_extra_rows``.

    A trace for each row, in the order of the rows; ``x`` is in the axis's unit, and the hover text has the
    formula, the bytes and the reason.
    """
    in_block = {block: sum(row.bytes for row in rows if term_of(row).block == block) for block in BLOCKS}
    blocks = [block for block in BLOCKS if in_block[block]]
    unit, unit_name = axis_unit(max(in_block.values()))
    whole, core = total(rows), sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)
    share = f"{core / whole:.0%} of it in the attention core" if core else "none of it in the attention core"
    sizes = ", ".join(f"{block} {size_text(in_block[block])}" for block in blocks)
    a, b, h, s = shape.letters()
    return chart(
        f"One layer keeps {size_text(whole)} for backward, {share}",
        [*(segment(row, term_of(row).block, shape, unit) for row in rows), *kinds_legend(rows)],
        f"Stacked bars at s={s}, b={b}, h={h}, a={a}: one layer keeps {whole:,} bytes for backward, {share}; {sizes}.",
        Axis("kept for backward", axis_end(max(in_block.values()) / unit), unit, in_unit=f", {unit_name}"),
        bargap=0.3,
        height=400,
        yaxis=downwards(blocks, tickfont={"size": 15}),
        # A formula is printed in its segment only where it fits at a readable size.
        uniformtext={"mode": "hide", "minsize": 12},
        margin={"t": 60},
        **STACKED,
    )


#: Each operation and the tensors that its gradient reads, in the order of the forward pass: the attention block, then
#: the MLP.
LAYER_OPERATIONS = (
    ("layer norm 1", ("layer-norm 1 input",)),
    ("Q, K, V products", ("QKV projection input",)),
    ("QKᵀ", ("Q", "K")),
    ("softmax", ("softmax output",)),
    ("dropout", ("softmax dropout mask",)),
    ("attention over V", ("softmax dropout output", "V")),
    ("projection", ("attention projection input",)),
    ("dropout", ("attention dropout mask",)),
    ("+ input", ()),
    ("layer norm 2", ("layer-norm 2 input",)),
    ("h→4h", ("h→4h input",)),
    ("GeLU", ("GeLU input",)),
    ("4h→h", ("4h→h input",)),
    ("dropout", ("MLP dropout mask",)),
    ("+ input", ()),
)
#: Names that fit into half of a line; next to its operation each is clear.  D: chapter 2's letter.
_SHORT = {"softmax dropout output": "D", "softmax dropout mask": "dropout mask"}
_OPERATION, _DARK, _AGAIN = Fill("#EEEEEE", ""), Fill(CARD, ""), FILLS["recomputed"]
_OP, _KEPT, _GAP, _HIGH = 1.55, 3.9, 0.12, 0.74
#: The upper part of a line is words, the lower part bars; all bars are of this height, so widths are bytes.
_BAR_TOP, _BAR = 0.4, 0.36
#: Where the words of a line's second tensor begin, after those of the first.
_SECOND = 2.35


def layer_drawing(rows: Sequence[Row], shape: ModelShape, step: int = len(LAYER_TERMS)) -> Drawing:
    """Figures 2 and 3 of the paper in one: operations in order, each next to the tensors that it keeps, as wide as
    their bytes.

    The first ``step`` of the 15 tensors are lit, as forward has stored them, the last one framed; the bar at the foot
    is the share that is stored.  rows: of one layer, from ``layer_rows``.  A tensor without a row is recomputed: it
    never lights up.  Raises ConfigError where step is not from 1 to 15.
    """
    if not 1 <= step <= len(LAYER_TERMS):
        raise ConfigError("step", f"must be from 1 to {len(LAYER_TERMS)}, got {step}")
    kept = {row.term: row for row in rows}
    lit, now = LAYER_TERMS[:step], LAYER_TERMS[step - 1]
    unit = axis_unit(min(row.bytes for row in rows))
    # What the widest line would hold if nothing were recomputed: so the scale doesn't depend on that.
    whole = {row.term: row.bytes for row in layer_rows(shape)}
    per_byte = _KEPT / max(sum(whole[term] for term in terms) for _, terms in LAYER_OPERATIONS)
    drawn: list[Box] = []
    arrows: list[tuple[float, float, str]] = []
    names: list[tuple[float, float, str]] = []
    frames: dict[str, Box] = {}
    for y, (operation, terms) in enumerate(LAYER_OPERATIONS):
        drawn.append(
            Box(0, y, _OP, _HIGH, _OPERATION, operation, f"{operation}: keeps {', '.join(terms) or 'nothing'}")
        )
        if y:
            arrows.append((_OP / 2, y - (1 - _HIGH) / 2, "↓"))
        bar = text = _OP + _GAP
        for term in terms:
            fill, name, hover = _look(term, kept.get(term), term in lit, shape, unit)
            names.append((text, y + 0.17, name))
            frames[term] = Box(bar, y + _BAR_TOP, per_byte * whole[term], _BAR, fill, "", hover)
            text += _SECOND
            bar += per_byte * whole[term]
    so_far, foot, width = (
        total(kept[term] for term in lit if term in kept),
        len(LAYER_OPERATIONS) + 0.1,
        _OP + _GAP + _KEPT,
    )
    share = f"stored so far: {size_text(so_far)} of {size_text(total(rows))}"
    drawn += [*frames.values(), Box(0, foot, width, 0.7, EMPTY, "", share)]
    drawn.append(Box(0, foot, width * so_far / total(rows), 0.7, Fill("#BBBBBB", ""), "", share))
    arrows.append((width / 2, foot + 0.35, f"{so_far / total(rows):.0%} stored"))
    size = kept[now].bytes if now in kept else 0
    said = f"{formula_of(kept[now], shape)} = {size_text(size)}" if now in kept else "not kept, made again in backward"
    frame = line("", *frames[now].outline(), INK, width=4, showlegend=False)
    a, b, h, s = shape.letters()
    return diagram(
        f"{step} of {len(LAYER_TERMS)}, {now}: {said};<br>stored so far {size_text(so_far)} of "
        f"{size_text(total(rows))}",
        [*boxes(drawn, 12), frame, labels(arrows, 12), labels(names, 12, "middle right")],
        f"Drawing of the layer at s={s}, b={b}, h={h}, a={a}, its operations in order with what each keeps: "
        f"tensor {step} of "
        f"{len(LAYER_TERMS)}, {now}, {size:,} bytes; stored so far {so_far:,} of {total(rows):,} bytes.",
        width + 0.08, foot + 0.75, 660, -0.08, -0.1,
    )  # fmt: skip


def _look(term: str, row: Row | None, lit: bool, shape: ModelShape, unit: tuple[int, str]) -> tuple[Fill, str, str]:
    """A tensor's fill, the words above it, and what pointing at it says."""
    name = _SHORT.get(term, term)
    if row is None:
        return _AGAIN, f"{name}, made again", f"<b>{term}</b>: not kept, made again in backward"
    formula, about = formula_of(row, shape), term_of(row)
    hover = f"<b>{term}</b>  {formula}<br>{exact_text(row.bytes)}<br>{about.why}"
    if not lit:
        return _DARK, name, hover
    return FILLS[about.kind], f"{name} <b>{formula}</b>, {three_digits(row.bytes / unit[0])} {unit[1]}", hover


#: What a player can say of an operation, the first of which is no answer.
NO_ANSWER, INPUT, INPUTS, OUTPUT, MASK, NOTHING = ("?", "its input", "both inputs", "its output", "a mask", "nothing")
ANSWERS = (NO_ANSWER, INPUT, INPUTS, OUTPUT, MASK, NOTHING)
_LINEARS = ("Q, K, V products", "projection", "h→4h", "4h→h")


def operations() -> dict[str, tuple[str, ...]]:
    """The layer's kinds of operation in the order of forward, each with all tensors that the layer keeps for it."""
    found: dict[str, tuple[str, ...]] = {}
    for name, terms in LAYER_OPERATIONS:
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
    of = {operation: [rows[term] for term in terms] for operation, terms in operations().items()}
    said = {operation: answers[_argument(operation)] for operation in of}
    right = {operation for operation, answer in said.items() if answer == kept_by(operation)}
    found, whole = sum(total(of[operation]) for operation in right), total(rows.values())
    verdicts = {
        operation: f"✓ {answer}, {size_text(total(of[operation]))}"
        if operation in right
        else answer
        if answer == NO_ANSWER
        else f"✗ {answer}"
        for operation, answer in said.items()
    }
    if len(right) == len(said):
        ending = f"you have found all {size_text(whole)},<br>every byte of equation 1"
    else:
        ending = f"{size_text(found)} of {size_text(whole)} found;<br>{_next(said, right)}"
    drawing = bar_chart(
        f"{len(right)} of {len(said)} right: {ending}",
        {
            row.term: {operation: row.bytes if operation in right else None}
            for operation, each in of.items()
            for row in each
        },
        "kept for backward",
        fills=[FILLS[term_of(row).kind] for each in of.values() for row in each],
        order=list(said),
        notes=verdicts,
        room_for=1.3 * max(map(total, of.values())),
    )
    return replace(drawing, axis=None)  # a game leaves no marks of the last move


def _argument(operation: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in operation)


def _next(said: Mapping[str, str], right: set[str]) -> str:
    wrong = [operation for operation, answer in said.items() if answer != NO_ANSWER and operation not in right]
    if wrong:
        return f"not {said[wrong[0]]} for {wrong[0]}: what does its gradient read?"
    return f"what does {next(operation for operation in said if operation not in right)} keep?"
