"""One way to make a table for a terminal: at most 80 columns, bytes in full, since they are exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from actmem.rows import Row


def numbers(name: str) -> Column:
    """A column of numbers: on the right, never broken."""
    return Column(name, justify="right", no_wrap=True)


def words(name: str) -> Column:
    """A column of sentences, which may be wrapped."""
    return Column(name, overflow="fold")


def table(title: str, *columns: str | Column, tight: bool = False) -> Table:
    """An empty table.  A column given by its name alone holds short text, which is never broken."""
    made = Table(
        *(Column(column, no_wrap=True) if isinstance(column, str) else column for column in columns),
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=tight,
    )
    return made


def red_if(wrong: bool) -> str:
    """The style of a table's line."""
    return "bold red" if wrong else ""


def two_lines(text: str, below: str) -> Text:
    """A cell with a dim second line."""
    return Text(text).append(f"\n{below}", style="dim")


def layers_table(rows: Iterable[Mapping[str, Any]], title: str) -> Table:
    """Bytes of one layer, predicted and measured, a line a configuration; of its ranks the one that is furthest off.

    Where all agree, it is the rank that holds most.  Below each name is its formula.
    """
    made = table(title, "bytes per layer and rank", *map(numbers, ("predicted", "extra", "measured", "diff.")))
    ranks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        ranks.setdefault(row["configuration"], []).append(row)
    for name, own in ranks.items():
        row = max(own, key=lambda one: (not one["exact"], abs(one["difference_bytes"]), one["measured_bytes"]))
        head, plus, last = name.rpartition("+")
        label = name if len(name) <= 25 else f"{head}\n  {plus}{last}"
        counts = (row[f"{kind}_bytes"] for kind in ("predicted", "extra", "measured", "difference"))
        cells = (f"{count:,}" for count in counts)
        made.add_row(two_lines(label, f"  sbh({row['formula']})"), *cells, style=red_if(not row["exact"]))
    return made


def reasons_table(extra: Iterable[Row]) -> Table:
    """What the paper leaves out, each with its reason, once a term."""
    made = table("", "extra", words("why it is kept, and why the paper leaves it out"))
    for term, reason in {row.term: row.extra for row in extra if row.extra}.items():
        made.add_row(term, reason)
    return made
