"""Tables for terminals, by rich.  Bytes in full, because to the byte is the point; 80 columns do."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from actmem.rows import Row


def table2_table(results: Iterable, title: str) -> Table:
    """Table 2 with what was measured beside it: a configuration a line, its formula below the name.

    results: objects with the fields of lab.table2.Result.
    """
    table = _plain_table(title)
    table.add_column("bytes per layer and rank", no_wrap=True)
    for name in ("predicted", "extra", "measured", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        name = Text(r.configuration)
        name.append(f"\n  sbh({r.formula})", style="dim")
        numbers = (r.predicted_bytes, r.extra_bytes, r.measured_bytes, r.difference_bytes)
        table.add_row(name, *(f"{number:,}" for number in numbers), style="" if r.exact else "bold red")
    return table


def extras_table(rows: Iterable[Row]) -> Table:
    """What the paper leaves out, each with its reason, once a term."""
    table = _plain_table("")
    table.add_column("extra", no_wrap=True)
    table.add_column("why it is kept, and why the paper leaves it out")
    seen = set()
    for row in rows:
        if row.extra and row.term not in seen:
            seen.add(row.term)
            table.add_row(row.term, row.extra)
    return table


def _plain_table(title: str) -> Table:
    return Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
