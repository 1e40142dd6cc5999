"""Print and write a lab's results: on rank 0 only, in at least 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from actmem_course.files import write_text
from actmem_tools import command_line

if TYPE_CHECKING:
    from actmem_course.ranks import Ranks

#: The style of a line that says that something disagrees.
WRONG = "bold red"


def screen_of(rank: int) -> Console:
    """Return a rich console for standard output, which prints on rank 0 only.

    Args:
        rank: this rank's number, from 0.
    """
    return command_line.screen(quiet=rank > 0, highlight=False)


def status(rank: int, text: str) -> Status:
    """Return a context that shows a spinner with ``text`` on rank 0's screen.

    Don't use it while something is timed: the spinner takes processor time.

    Args:
        rank: this rank's number, from 0; on others than 0 nothing is shown.
        text: what the lab does meanwhile, such as "measuring".
    """
    return Console(stderr=True, quiet=rank > 0).status(text)


def gather_rows(here: Ranks, own: Iterable) -> list:
    """Collect the results (dicts for JSON) of all ranks in one list, in rank order. Every rank must call this function.

    Args:
        here: this rank, with its connection to the other ranks, from ``actmem_course.ranks.ranks``.
        own: this rank's results.
    """
    return [row for of_rank in here.gather(list(own)) for row in of_rank]


def write_rows(path: Path | None, rank: int, rows: object) -> None:
    """Write a lab's results as JSON to a file, on rank 0 only.

    Args:
        path: the file, as given to --json; None writes nothing.
        rank: this rank's number, from 0.
        rows: the results, any value that ``json.dumps`` takes.
    """
    if path is not None and rank == 0:
        write_text(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")


def show_progress(rank: int, text: str = "") -> None:
    """Show ``text`` in one line on rank 0's stderr, which the next call overwrites; do nothing if stderr is a file.

    Args:
        rank: this rank's number, from 0.
        text: such as "timing: round 3 of 22"; "" clears the line.
    """
    if rank == 0:
        command_line.show_progress(text)
