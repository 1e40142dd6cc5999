"""A bill: everything that one rank holds at one moment, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actmem.rows import Row, total


@dataclass(frozen=True)
class Bill:
    """Rows by part ("weights", "activations", …) at one moment of the step, in bytes of one rank."""

    moment: str
    parts: Mapping[str, Sequence[Row]]

    @property
    def bytes(self) -> int:
        """All rows together."""
        return sum(total(rows) for rows in self.parts.values())

    @property
    def rows(self) -> list[Row]:
        """All rows, in order."""
        return [row for rows in self.parts.values() for row in rows]

    def by_part(self) -> dict[str, int]:
        """Bytes of each part, without the empty ones."""
        sums = {part: total(rows) for part, rows in self.parts.items()}
        return {part: size for part, size in sums.items() if size}


def highest(bills: Sequence[Bill]) -> Bill:
    """The bill of the moment that holds most; the first of several."""
    return max(bills, key=lambda bill: bill.bytes)
