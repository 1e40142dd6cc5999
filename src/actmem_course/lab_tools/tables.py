"""Make tables for the terminal, at most 80 columns wide. Bytes are printed with all digits, because they are exact."""

from rich.table import Column, Table
from rich.text import Text

from actmem_tools.command_line import empty_table


def numbers(name: str) -> Column:
    """Return a column for numbers, aligned right and never wrapped, with ``name`` as its heading."""
    return Column(name, justify="right", no_wrap=True)


def words(name: str) -> Column:
    """Return a column for sentences, which may wrap, with ``name`` as its heading."""
    return Column(name, overflow="fold")


def table(title: str, *columns: str | Column, tight: bool = False) -> Table:
    """Make a table with columns and no lines yet.

    Args:
        title: the line above the table.
        columns: each a column from ``numbers`` or ``words``, or a string: the heading of a column for short text that
            never wraps.
        tight: whether to put less space between the columns.
    """
    made = empty_table(title)
    made.collapse_padding = tight
    for column in columns:
        own = Column(column, no_wrap=True) if isinstance(column, str) else column
        made.add_column(own.header, justify=own.justify, no_wrap=own.no_wrap, overflow=own.overflow)
    return made


def red_if(wrong: bool) -> str:
    """Return a style for a line of a rich table: "bold red" if ``wrong``, else ""."""
    return "bold red" if wrong else ""


def two_lines(text: str, below: str) -> Text:
    """Return a table cell of two lines: ``text``, and under it ``below`` in dim letters."""
    return Text(text).append(f"\n{below}", style="dim")
