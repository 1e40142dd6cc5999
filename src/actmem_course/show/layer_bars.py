"""What one layer keeps, as stacked bars: a bar for each block, a segment for each stored tensor."""

from __future__ import annotations

from collections.abc import Sequence

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.rows import Row, total
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import FILLS, axis_end, axis_unit, size_text
from actmem_course.show.terms import BLOCKS, KINDS, formula_of, term_of


def layer_bars(rows: Sequence[Row], shape: ModelShape) -> Drawing:
    """Draw rows of one layer, from ``layer_rows`` and, if wanted, ``layer_extra_rows``.

    A trace for each row, in the order of the rows; ``x`` is in the axis's unit, and the hover text has the
    formula, the bytes and the reason.
    """
    in_block = {block: sum(row.bytes for row in rows if term_of(row).block == block) for block in BLOCKS}
    blocks = [block for block in BLOCKS if in_block[block]]
    unit, unit_name = axis_unit(max(in_block.values()))
    traces = [_segment(row, shape, unit) for row in rows] + _legend(rows)
    whole, core = total(rows), sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)
    share = f"{core / whole:.0%} of it in the attention core" if core else "none of it in the attention core"
    sizes = ", ".join(f"{block} {size_text(in_block[block])}" for block in blocks)
    a, b, h, s = shape.letters()
    axis = Axis(f"kept for backward, {unit_name}", axis_end(max(in_block.values()) / unit), unit)
    return Drawing(
        traces,
        {
            "title": {"text": f"One layer keeps {size_text(whole)} for backward, {share}"},
            "barmode": "stack",
            "bargap": 0.3,
            "height": 400,
            "xaxis": {"title": {"text": axis.title}, "range": [0, axis.end]},
            "yaxis": {"categoryorder": "array", "categoryarray": blocks[::-1], "tickfont": {"size": 15}},
            # A formula is printed in its segment only where it fits at a readable size.
            "uniformtext": {"mode": "hide", "minsize": 12},
            "legend": {"traceorder": "normal"},
            "margin": {"t": 60},
        },
        f"Stacked bars at s={s}, b={b}, h={h}, a={a}: one layer keeps {whole:,} bytes for backward, {share}; {sizes}.",
        axis,
    )


def _segment(row: Row, shape: ModelShape, unit: int) -> dict:
    term, formula = term_of(row), formula_of(row, shape)
    fill = FILLS[term.kind]
    split = f", split by {row.split_by}" if row.split_by > 1 else ""
    return {
        "type": "bar",
        "orientation": "h",
        "name": row.term,
        "x": [row.bytes / unit],
        "y": [term.block],
        "marker": fill.marker(),
        "text": [formula],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": fill.text, "size": 13},
        "hovertemplate": f"<b>{row.term}</b>  {formula}{split}<br>{row.bytes:,} B = {size_text(row.bytes)}"
        f"<br>{term.why}<extra></extra>",
        "showlegend": False,
    }


def _legend(rows: Sequence[Row]) -> list[dict]:
    """An empty trace for each kind that occurs: legends by kind, whatever the number of segments."""
    present = {term_of(row).kind for row in rows}
    return [
        {
            "type": "bar",
            "name": kind,
            "x": [None],
            "y": [None],
            "orientation": "h",
            "marker": FILLS[kind].marker(),
            "hoverinfo": "skip",
        }
        for kind in KINDS
        if kind in present
    ]
