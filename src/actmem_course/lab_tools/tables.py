"""One way to make a table for a terminal: at most 80 columns, bytes in full, since they are exact."""

from __future__ import annotations

from rich import box
from rich.table import Column, Table
from rich.text import Text


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
