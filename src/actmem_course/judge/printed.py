"""Show what learners' code prints: each line with its rank, once per exercise, and at most ``MOST_LINES`` lines."""

import io
from collections.abc import Callable

from actmem_course.judge.virtual import rank_of_this_thread

#: How many lines of an exercise are shown at most, and how many characters of each line.
MOST_LINES, MOST_CHARACTERS = 100, 300


class Printed(io.TextIOBase):
    """A stream that replaces standard output while learners' code runs.

    It shows a line when the line is complete.  A line that a rank prints again in the same exercise isn't shown again.

    Args:
        show: a function that shows a line; it is called with each line to show.

    Attributes:
        size: how many ranks there are.  With more than one, each line begins with the number of its rank.
    """

    def __init__(self, show: Callable[[str], None]):
        super().__init__()
        self._show, self.size = show, 1
        self._open: dict[int, str] = {}
        self._lines: set[tuple[int, str]] = set()
        self._cut_lines = self._cut_characters = 0

    def write(self, text: str) -> int:
        """Append to the output of this thread's rank, and show the lines that are now complete.

        Args:
            text: what the learner's code prints.

        Returns: how many characters ``text`` has, as a stream's ``write`` does.
        """
        rank = rank_of_this_thread()
        *lines, rest = (self._open.get(rank, "") + text).split("\n")
        for line in lines:
            self._note(rank, line)
        self._open[rank] = rest[: MOST_CHARACTERS + 1]
        return len(text)

    def end(self) -> None:
        """End an exercise: show incomplete lines, and then a line that says how many lines were left out."""
        for rank, line in self._open.items():
            if line:
                self._note(rank, line)
        if self._cut_lines:
            self._show(f"… {self._cut_lines:,} more lines ({self._cut_characters:,} characters) are cut")
        self._open, self._lines = {}, set()
        self._cut_lines = self._cut_characters = 0

    def _note(self, rank: int, line: str) -> None:
        shown = line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"
        if (rank, shown) in self._lines:
            return
        if len(self._lines) == MOST_LINES:
            self._cut_lines, self._cut_characters = self._cut_lines + 1, self._cut_characters + len(line) + 1
            return
        self._lines.add((rank, shown))
        self._show(f"rank {rank}: {shown}" if self.size > 1 else shown)
