"""A ledger as text, and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from actmem.measure.fold import Folded, fold

#: How many lines a ledger shows of itself.
_SHOWN = 30


def readable_size(size: int) -> str:
    """Bytes in a unit that one can read: ``12.3 MiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{size:,} B" if unit == "B" else f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:,.4g} GiB"


def lines_of(folded: Iterable[Folded]) -> list[tuple[str, ...]]:
    """Cells of a table: bytes, module, operation, shape, dtype, kind."""
    return [
        (
            f"{one.bytes:,}",
            f"{one.module or 'root'}{f' ×{one.count}' if one.count > 1 else ''}",
            f"{one.row.op} {one.row.argument}".rstrip(),
            "×".join(map(str, one.row.shape)) or "scalar",
            str(one.row.dtype).removeprefix("torch."),
            one.row.kind + (f", held by {one.row.held_by}" if getattr(one.row, "held_by", "") else ""),
        )
        for one in folded
    ]


HEADINGS = ("bytes", "module", "operation", "shape", "dtype", "kind")


def aligned(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as text; the first column is flush right."""
    columns = list(zip(headings, *lines)) if lines else [(heading,) for heading in headings]
    widths = [max(map(len, column)) for column in columns]
    text = [
        "  ".join(
            cell.rjust(width) if i == 0 else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in (headings, *lines)
    ]
    return "\n".join(line.rstrip() for line in text)


def ledger_text(ledger: Any, shown: int = _SHOWN) -> str:
    """The ledger's total, its kinds, and its largest rows."""
    folded = fold(ledger.tensors)
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in ledger.by_kind().items())
    head = f"{ledger.total_bytes:,} B ({readable_size(ledger.total_bytes)}) stay for backward: {kinds or 'nothing'}"
    text = f"{head}\n{aligned(HEADINGS, lines_of(folded[:shown]))}" if folded else head
    return text + (f"\n… and {len(folded) - shown} smaller rows" if len(folded) > shown else "")


def ledger_html(ledger: Any, shown: int = _SHOWN) -> str:
    """The same as an HTML table."""
    folded = fold(ledger.tensors)
    left = "text-align:left;padding:0 .8em 0 0"
    head = "".join(f'<th style="{left}">{escape(heading)}</th>' for heading in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f'<td style="{left}">{escape(cell)}</td>' for cell in line) + "</tr>"
        for line in lines_of(folded[:shown])
    )
    total = f"<p><b>{ledger.total_bytes:,} B</b> ({readable_size(ledger.total_bytes)}) stay for backward</p>"
    rest = f"<p>… and {len(folded) - shown} smaller rows</p>" if len(folded) > shown else ""
    return f"{total}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def bill_text(bill: Any, shown: int = _SHOWN) -> str:
    """The peak, its kinds, and its largest rows."""
    folded = fold(bill.peak)
    head = f"peak {bill.peak_bytes:,} B ({readable_size(bill.peak_bytes)}), in {bill.peak_phase}"
    kinds = [(f"{size:,}", kind) for kind, size in bill.by_kind().items()]
    parts = [head, aligned(("bytes", "kind"), kinds), aligned(HEADINGS, lines_of(folded[:shown]))]
    return "\n\n".join(parts) + (f"\n… and {len(folded) - shown} smaller rows" if len(folded) > shown else "")


def bill_html(bill: Any, shown: int = _SHOWN) -> str:
    """The same as preformatted text."""
    return f"<pre>{escape(bill_text(bill, shown))}</pre>"
