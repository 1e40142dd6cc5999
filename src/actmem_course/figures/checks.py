"""What a notebook says in one line, with the rest in a fold: sizes in full, and a chapter's comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from html import escape

from actmem.rows import Row, by_term
from actmem_course.others.disagreements import disagreements

WRAPPED = ' style="white-space: pre-wrap"'


class Fold:
    """One line; ``details``, text of any length, opens below it.  Stored as text it is the line alone.

    prose: sentences, which wrap where the page ends; a table does not.
    """

    def __init__(self, line: str, details: str, prose: bool = False):
        self.line, self.details, self._prose = line, details, prose

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        return (
            f'<details class="actmem-fold"><summary>{escape(self.line)}</summary>'
            f'<pre tabindex="0"{WRAPPED * self._prose}>{escape(self.details)}</pre></details>'
        )


def worked(*steps: str) -> Fold:
    """The answer to a problem that a reader works out first: a line a step, folded."""
    return Fold("Answer", "\n".join(steps), prose=True)


class Agreement:
    """Every comparison of a chapter, collected as it goes and shown once: predicted = measured, n of n.

    A pair of whole numbers, fractions or lists agrees if both are equal: there is no tolerance.  Statements, which are
    pairs of booleans, are listed and not counted.
    """

    def __init__(self) -> None:
        self._compared: list[tuple[str, list[tuple], str]] = []

    def add(self, what: str, pairs: Iterable[tuple], unit: str = "bytes") -> None:
        """Compare pairs."""
        self._compared.append((what, list(pairs), unit))

    def add_rows(self, what: str, predicted: Iterable[Row], measured: Iterable[Row]) -> None:
        """Compare rows term by term.  A term that only one side has is 0 on the other."""
        left, right = by_term(predicted), by_term(measured)
        pairs = [(left.get(term, 0), right.get(term, 0)) for term in {**left, **right}]
        self.add(f"{what}, term by term", [pair for pair in pairs if any(pair)])

    def folded(self) -> Fold:
        """How many pairs of numbers are equal; the comparisons, a line each, in the fold."""
        pairs = [pair for _, these, _ in self._compared for pair in these if not isinstance(pair[0], bool)]
        equal = sum(one == other for one, other in pairs)
        details = "\n".join(_compared(*one) for one in self._compared)
        return Fold(f"predicted = measured: {equal} of {len(pairs)}", details)

    def __repr__(self) -> str:
        return repr(self.folded())

    def _repr_html_(self) -> str:
        return self.folded()._repr_html_()


def _compared(what: str, pairs: list[tuple], unit: str) -> str:
    apart = [f"{_number(one)} and {_number(other)}" for one, other in pairs if one != other]
    if pairs and isinstance(pairs[0][0], bool):
        return f"{what}: {'yes' if not apart else 'no'}"
    if not apart and len(pairs) == 1:
        return f"{what}: {_number(pairs[0][0])} {unit}"
    return f"{what}: {len(pairs) - len(apart)} of {len(pairs)}" + "".join(f"; {one} {unit}".rstrip() for one in apart)


def _number(value: int | Fraction | list) -> str:
    if isinstance(value, list):  # the sizes of a tensor
        return str(value)
    return f"{int(value):,}" if value == int(value) else f"{float(value):,}"


def in_the_paper() -> Fold:
    """Where the paper's text, its formulas and our counts differ, a paragraph for each place."""
    found = disagreements()
    line = f"Where the paper's text, its formulas and our counts differ: {len(found)} places"
    return Fold(line, "\n\n".join(map(str, found)), prose=True)
