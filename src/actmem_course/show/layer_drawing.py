"""The layer as a drawing: its operations in order, each next to the tensors that it keeps, as wide as their bytes.

Figures 2 and 3 of 2205.05198 in one, drawn from rows: the left column is the attention block, the right one the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import layer_rows
from actmem.rows import LAYER_TERMS, Row, total
from actmem_course.show.boxes import EMPTY, Box, box_traces, diagram_layout, label_trace
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import FILLS, INK, Fill, axis_unit, size_text, three_digits
from actmem_course.show.terms import formula_of, term_of

#: The two columns: each operation and the tensors that its gradient reads, in the order of the forward pass.
ATTENTION_COLUMN = (
    ("layer<br>norm 1", ("layer-norm 1 input",)),
    ("Q, K, V<br>products", ("QKV projection input",)),
    ("QKᵀ", ("Q", "K")),
    ("softmax", ("softmax output",)),
    ("dropout", ("softmax dropout mask",)),
    ("attention<br>over V", ("softmax dropout output", "V")),
    ("projection", ("attention projection input",)),
    ("dropout", ("attention dropout mask",)),
    ("+ input", ()),
)
MLP_COLUMN = (
    ("layer<br>norm 2", ("layer-norm 2 input",)),
    ("h→4h", ("h→4h input",)),
    ("GeLU", ("GeLU input",)),
    ("4h→h", ("4h→h input",)),
    ("dropout", ("MLP dropout mask",)),
    ("+ input", ()),
)
#: Names that fit into half of a line; next to its operation each is clear.
_SHORT = {"softmax dropout output": "dropout output", "softmax dropout mask": "dropout mask"}
_OPERATION, _DARK, _AGAIN = Fill("#EEEEEE", ""), Fill("#FFFFFF", ""), Fill("#FFFFFF", "/")
_COLUMN, _OP, _KEPT, _GAP, _HIGH, _FOOT = 5.2, 1.0, 3.9, 0.15, 0.74, 7.24
#: The upper part of a line is words, the lower part bars; all bars are of this height, so widths are bytes.
_BAR_TOP, _BAR = 0.4, 0.36
#: Where the words of a line's second tensor begin, after those of the first.
_SECOND = 2.35


def layer_drawing(rows: Sequence[Row], shape: ModelShape, step: int = len(LAYER_TERMS)) -> Drawing:
    """The first ``step`` of the 15 tensors lit, as forward has stored them, the last one framed.

    rows: of one layer, from ``layer_rows``.  A tensor without a row is recomputed: it
    never lights up.  Raises ConfigError where step is not from 1 to 15.
    """
    if not 1 <= step <= len(LAYER_TERMS):
        raise ConfigError("step", f"must be from 1 to {len(LAYER_TERMS)}, got {step}")
    kept = {row.term: row for row in rows}
    lit, now = LAYER_TERMS[:step], LAYER_TERMS[step - 1]
    unit = axis_unit(min(row.bytes for row in rows))
    # What the widest line would hold if nothing were recomputed: so the scale doesn't depend on that.
    whole = {row.term: row.bytes for row in layer_rows(shape)}
    lines = [terms for _, terms in ATTENTION_COLUMN + MLP_COLUMN]
    per_byte = _KEPT / max(sum(whole[term] for term in terms) for terms in lines)
    boxes: list[Box] = []
    arrows: list[tuple[float, float, str]] = []
    names: list[tuple[float, float, str]] = []
    frames: dict[str, Box] = {}
    for x, column in ((0.0, ATTENTION_COLUMN), (_COLUMN, MLP_COLUMN)):
        for y, (operation, terms) in enumerate(column):
            said = f"{operation.replace('<br>', ' ')}: keeps {', '.join(terms) or 'nothing'}"
            boxes.append(Box(x, y, _OP, _HIGH, _OPERATION, operation, said))
            if y:
                arrows.append((x + _OP / 2, y - (1 - _HIGH) / 2, "↓"))
            bar = text = x + _OP + _GAP
            for term in terms:
                fill, words, hover = _look(term, kept.get(term), term in lit, shape, unit)
                names.append((text, y + 0.17, words))
                frames[term] = Box(bar, y + _BAR_TOP, per_byte * whole[term], _BAR, fill, "", hover)
                text += _SECOND
                bar += per_byte * whole[term]
    boxes += frames.values()
    arrows.append((_COLUMN + _OP / 2, -0.3, "from the attention block ↓"))
    so_far = total(kept[term] for term in lit if term in kept)
    boxes += _stored(so_far, total(rows))
    arrows.append((_COLUMN + (_OP + _GAP + _KEPT) / 2, _FOOT + 0.25, f"{so_far / total(rows):.0%} stored"))
    size = kept[now].bytes if now in kept else 0
    said = f"{formula_of(kept[now], shape)} = {size_text(size)}" if now in kept else "not kept, made again in backward"
    layout = diagram_layout(_COLUMN + _OP + _GAP + _KEPT, len(ATTENTION_COLUMN))
    layout["yaxis"] = {**layout["yaxis"], "range": [len(ATTENTION_COLUMN), -0.6]}
    layout["xaxis"] = {**layout["xaxis"], "range": [-0.08, _COLUMN + _OP + _GAP + _KEPT + 0.08]}
    a, b, h, s = shape.letters()
    return Drawing(
        [*box_traces(boxes, 12), _frame(frames[now]), label_trace(arrows, 12), label_trace(names, 12, "middle right")],
        {
            **layout,
            "title": {
                "text": f"{step} of {len(LAYER_TERMS)}, {now}: {said};<br>stored so far {size_text(so_far)} of {size_text(total(rows))}"
            },
            "height": 560,
        },
        f"Drawing of the layer at s={s}, b={b}, h={h}, a={a}, its operations in order with what each keeps: tensor {step} of "
        f"{len(LAYER_TERMS)}, {now}, {size:,} bytes; stored so far {so_far:,} of {total(rows):,} bytes.",
    )


def _look(term: str, row: Row | None, lit: bool, shape: ModelShape, unit: tuple[int, str]) -> tuple[Fill, str, str]:
    """A tensor's fill, the words above it, and what pointing at it says."""
    name = _SHORT.get(term, term)
    if row is None:
        return _AGAIN, f"{name}, made again", f"<b>{term}</b>: not kept, made again in backward"
    formula, about = formula_of(row, shape), term_of(row)
    hover = f"<b>{term}</b>  {formula}<br>{row.bytes:,} B = {size_text(row.bytes)}<br>{about.why}"
    if not lit:
        return _DARK, name, hover
    return FILLS[about.kind], f"{name} <b>{formula}</b>, {three_digits(row.bytes / unit[0])} {unit[1]}", hover


def _frame(box: Box) -> dict:
    right, bottom = box.x + box.width, box.y + box.height
    return {
        "type": "scatter", "mode": "lines", "x": [box.x, right, right, box.x, box.x], "y": [box.y, box.y, bottom, bottom, box.y],
        "line": {"color": INK, "width": 4}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _stored(so_far: int, whole: int) -> list[Box]:
    """The share of all tensors that is stored so far; under the MLP, where there is room."""
    width = _OP + _GAP + _KEPT
    say = f"stored so far: {size_text(so_far)} of {size_text(whole)}"
    return [
        Box(_COLUMN, _FOOT, width, 0.5, EMPTY, "", say),
        Box(_COLUMN, _FOOT, width * so_far / whole, 0.5, Fill("#BBBBBB", ""), "", say),
    ]
