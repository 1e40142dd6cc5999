"""One way to make a table for a terminal: at most 80 columns, and bytes in full, since they are exact."""

from rich.table import Column, Table
from rich.text import Text

from actmem_tools.command_line import empty_table


def numbers(name: str) -> Column:
    """Return a column of numbers: aligned to the right, never broken."""
    return Column(name, justify="right", no_wrap=True)


def words(name: str) -> Column:
    """Return a column of sentences, which may be wrapped."""
    return Column(name, overflow="fold")


def table(title: str, *columns: str | Column, tight: bool = False) -> Table:
    """Make an empty table. A column given by its name alone holds short text, which is never broken.

    Args:
        tight: put less space between the columns.
    """
    made = empty_table(title)
    made.collapse_padding = tight
    for column in columns:
        own = Column(column, no_wrap=True) if isinstance(column, str) else column
        made.add_column(own.header, justify=own.justify, no_wrap=own.no_wrap, overflow=own.overflow)
    return made


def red_if(wrong: bool) -> str:
    """Return the style of a table's line: red if ``wrong``."""
    return "bold red" if wrong else ""


def two_lines(text: str, below: str) -> Text:
    """Return a cell with a dim second line."""
    return Text(text).append(f"\n{below}", style="dim")
