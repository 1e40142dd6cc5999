"""Tables as plain text for notebooks: numbers in full, columns aligned, the same on every machine.

They are text and not HTML, because notebooks' outputs are compared cell by cell with the stored ones, and text is
readable without styles.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actmem.rows import Row
from actmem_course.figures.units import milliseconds


def text_table(
    header: Sequence[str], lines: Iterable[Sequence[object]], right: str = "", last_is_sum: bool = False
) -> str:
    """Return a table as text; integers get thousands separators.

    Args:
        header: The columns' names.
        lines: The cells of each line, text or numbers.
        right: One character for each column: ``r`` aligns the column to the right, any other character to the left.
            Columns without a character are aligned to the left.
        last_is_sum: Whether the last line is a sum, with a rule above it.
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


def extras_text(rows: Iterable[Row]) -> str:
    """Return a table, as text, of the tensors that the paper leaves out, each with the reason.

    Args:
        rows: Any rows; rows of tensors that the paper counts are skipped.
    """
    return text_table(
        ("extra", "bytes", "why the paper leaves it out"),
        [(row.term, row.bytes, row.extra) for row in rows if row.extra],
        " r",
    )


def saved_text(saved: Iterable) -> str:
    """Return a table, as text, of saved tensors, a line for each, and the sum of their bytes.

    Args:
        saved: The ``SavedTensor`` objects in ``Ledger.saved``.
    """
    saved = list(saved)
    if not saved:
        return "nothing is saved"
    lines: list[tuple] = [
        (
            t.module or "(itself)",
            t.op,
            f"argument {t.argument}" if t.argument else "made by it",
            list(t.shape),
            str(t.dtype).removeprefix("torch."),
            t.bytes,
        )
        for t in saved
    ]
    lines.append(("together", "", "", "", "", sum(t.bytes for t in saved)))
    return text_table(
        ("module", "operation", "which tensor", "shape", "dtype", "bytes"), lines, "     r", last_is_sum=True
    )


def overhead_text(over: Mapping[str, Any] | None) -> str:
    """Return a text that says how much longer one candidate takes than another: ``+4.1% ±0.3``.

    Args:
        over: The dict that ``lab_tools.timing.Timings.over`` returns.

    Returns: the text; ``within ±0.5%`` if the difference could be noise; a dash if ``over`` is None.
    """
    if over is None:
        return "–"
    if not over["is_real"]:
        return f"within ±{_percent(over['within'])}%"
    return f"{100 * over['value']:+.1f}% ±{_percent(over['margin'])}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def speed_facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a text with the measured times of each variant of the layer, such as "selective".

    The times for forward, backward and both are three medians, so the first two don't add up to the third.

    Args:
        rows: What labs/measure_speed.py writes to --json, a row for each variant.

    Returns: by the variant's name, a text such as ``forward 1.23, backward 2.34, both 3.56 ms, overhead +4.1% ±0.3``.
    """
    facts = {}
    for row in rows:
        forward, backward, both = (milliseconds(row[f"{part}_seconds"]) for part in ("forward", "backward", "combined"))
        times = f"forward {forward}, backward {backward}, both {both} ms"
        facts[row["name"]] = f"{times}, overhead {overhead_text(row['over'])}" if row["over"] else times
    return facts
