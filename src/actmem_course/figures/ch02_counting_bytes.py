"""A layer's saved tensors as segments of bars, for the chapters after the second."""

from __future__ import annotations

from collections.abc import Iterable

from actmem.config import ModelShape
from actmem.rows import Row
from actmem_course.figures.marks import bars, legend
from actmem_course.figures.style import FILLS
from actmem_course.figures.terms import KINDS, formula_of, term_of
from actmem_course.figures.units import exact_text


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
