"""What a lab prints its tables with.  Loads no torch."""

from rich.console import Console

#: Tables are made for this many columns; on a narrower screen the terminal wraps lines, and no digit is lost.
LEAST_COLUMNS = 80


def lab_console(**options) -> Console:
    """A console of at least ``LEAST_COLUMNS``."""
    made = Console(**options)
    made.width = max(LEAST_COLUMNS, made.width)
    return made
