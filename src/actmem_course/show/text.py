"""Tables as plain text for notebooks: numbers in full, columns aligned, the same on every machine.

Text and not HTML, because outputs are compared cell by cell with the stored ones, and text is
readable without styles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actmem.config import ModelShape
from actmem.rows import Comparison, Match, Row, total
from actmem_course.show.style import size_text
from actmem_course.show.terms import formula_of


def text_table(
    header: Sequence[str], lines: Iterable[Sequence[object]], right: str = "", last_is_sum: bool = False
) -> str:
    """A table of text; integers get thousands separators.

    right: a character for each column, ``r`` to align it to the right, anything else to the left.
    last_is_sum: rule off the last line.
    """
    body = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *body)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, right.ljust(len(widths)))
        ]
        return "  ".join(aligned).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    parts = [line(header), rule, *map(line, body)]
    if last_is_sum:
        parts.insert(-1, rule)
    return "\n".join(parts)


def rows_text(rows: Sequence[Row], shape: ModelShape) -> str:
    """Rows of a layer with their formulas, and the sum."""
    lines = [(row.term, formula_of(row, shape) or "extra", row.bytes, size_text(row.bytes)) for row in rows]
    lines.append(("together", "", total(rows), size_text(total(rows))))
    return text_table(("stored tensor", "formula", "bytes", ""), lines, "  rr", last_is_sum=True)


def extras_text(rows: Iterable[Row]) -> str:
    """Rows that the paper leaves out, each with its reason."""
    return text_table(
        ("extra", "bytes", "why the paper leaves it out"),
        [(row.term, row.bytes, row.extra) for row in rows if row.extra],
        " r",
    )


def apart_text(what: str, pairs: Iterable[tuple], unit: str = "bytes") -> str:
    """One sentence in place of a table of zeros: how many pairs were compared (if several), and how far apart they are in all.

    pairs: what a formula says and what was counted, whole numbers or fractions.
    """
    pairs = list(pairs)
    apart = sum(abs(one - other) for one, other in pairs)
    exact = int(apart) if apart == int(apart) else float(apart)
    return f"{f'{len(pairs)} ' if len(pairs) > 1 else ''}{what}: {exact:,} {unit} apart"


def kept_text(saved: Iterable) -> str:
    """The few tensors that one operation keeps, a line for each."""
    lines = [
        f"{t.op} keeps {f'argument {t.argument}' if t.argument else 'what it made'}, {_sizes(t.shape)} {_dtype(t.dtype)}: {t.bytes:,} bytes"
        for t in saved
    ]
    return "\n".join(lines) or "nothing is kept"


def saved_text(saved: Iterable) -> str:
    """What a ledger holds: its ``saved``, a line for each tensor, and the sum."""
    saved = list(saved)
    if not saved:
        return "nothing is kept"
    lines = [
        (
            t.module or "(itself)",
            t.op,
            f"argument {t.argument}" if t.argument else "made by it",
            _sizes(t.shape),
            _dtype(t.dtype),
            t.bytes,
        )
        for t in saved
    ]
    lines.append(("together", "", "", "", "", sum(t.bytes for t in saved)))
    return text_table(
        ("module", "operation", "which tensor", "shape", "dtype", "bytes"), lines, "     r", last_is_sum=True
    )


def comparison_text(comparison: Comparison) -> str:
    """Predicted and measured bytes by term, with the difference, and the sums."""
    matches = [*comparison.matched, *comparison.changed, *comparison.missing, *comparison.extra]
    lines: list[tuple[object, ...]] = [(m.term, *_both(m), m.difference) for m in matches]
    sums = [sum(getattr(m, side) or 0 for m in matches) for side in ("predicted", "measured")]
    lines.append(("together", *sums, sums[1] - sums[0]))
    return text_table(("stored tensor", "predicted", "measured", "difference"), lines, " rrr", last_is_sum=True)


def table2_text(results: Iterable[dict]) -> str:
    """Table 2 measured, from what labs/measure_table2.py writes: one line for each configuration and rank given."""
    lines = [
        (
            r["configuration"],
            r["formula"],
            r["predicted_bytes"],
            r["extra_bytes"],
            r["measured_bytes"],
            r["difference_bytes"],
        )
        for r in results
    ]
    header = ("configuration", "formula, × sbh", "predicted", "extra", "measured", "difference")
    return text_table(header, lines, "  rrrr")


def _both(match: Match) -> tuple[object, object]:
    predicted, measured = ("–" if side is None else side for side in (match.predicted, match.measured))
    return predicted, measured


def _sizes(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
