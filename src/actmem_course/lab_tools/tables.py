"""Make tables for the terminal, at most 80 columns wide. Bytes are printed with all digits, because they are exact."""

from rich.table import Column, Table
from rich.text import Text

from actmem_tools.command_line import empty_table


def numbers(name: str) -> Column:
    """Return a column for numbers: aligned right, never wrapped."""
    return Column(name, justify="right", no_wrap=True)


def words(name: str) -> Column:
    """Return a column for sentences, which may wrap."""
    return Column(name, overflow="fold")


def table(title: str, *columns: str | Column, tight: bool = False) -> Table:
    """Make an empty table.

    Args:
        title: the line above the table.
        columns: the columns; one given as a string, its name, is for short text that never wraps.
        tight: whether to put less space between the columns.
    """
    made = empty_table(title)
    made.collapse_padding = tight
    for column in columns:
        own = Column(column, no_wrap=True) if isinstance(column, str) else column
        made.add_column(own.header, justify=own.justify, no_wrap=own.no_wrap, overflow=own.overflow)
    return made


def red_if(wrong: bool) -> str:
    """Return a rich style for a line of a table: bold red if ``wrong``, else plain."""
    return "bold red" if wrong else ""


def two_lines(text: str, below: str) -> Text:
    """Return a table cell with ``text`` and below it a dim second line."""
    return Text(text).append(f"\n{below}", style="dim")
