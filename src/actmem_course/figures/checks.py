"""Results that a notebook shows in one line, with details that a click shows; and the comparisons of a chapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from actmem.rows import Row, by_term
from actmem_course.figures.style import WARNING

#: A line that says that something is wrong, on light and dark pages.
_WRONG = f"background: #FDE7E9; color: {WARNING}; font-weight: 700; font-size: 1.2em"
#: Colours of a badge, whose words are white.
_GOOD, _BAD = "#00664A", WARNING


class Fold:
    """A line of output with details that a click shows below it. The stored notebook has only the line.

    Args:
        line: The line that is always visible.
        details: The text that a click shows.
        prose: Whether the details are sentences, which wrap at the edge of the page; lines of a table don't.
        is_wrong: Whether the line reports something wrong; it is then red.
    """

    def __init__(self, line: str, details: str, prose: bool = False, is_wrong: bool = False):
        self.line, self.details, self._prose, self._is_wrong = line, details, prose, is_wrong

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        wraps = ' style="white-space: pre-wrap"' if self._prose else ""
        look = f' style="{_WRONG}"' if self._is_wrong else ""
        return (
            f'<details class="actmem-fold"><summary{look}>{escape(self.line)}</summary>'
            f'<pre tabindex="0"{wraps}>{escape(self.details)}</pre></details>'
        )


def worked(*steps: str) -> Fold:
    """Return the answer to a problem that the reader should solve first: a line "Answer", which a click opens.

    Args:
        steps: The lines of the answer.
    """
    return Fold("Answer", "\n".join(steps), prose=True)


#: Up to this many pairs are shown one by one; of more only how many are equal.
_LISTED = 4


@dataclass(frozen=True)
class Comparison:
    """Pairs (predicted, counted) of values of one kind.

    A value is a number, the shape of a tensor (a list), or True or False. A pair agrees if its values are equal: there
    is no tolerance.

    Attributes:
        what: A text that says what is compared, such as "bytes saved by one layer".
        pairs: The pairs, each of a predicted and a counted value.
        unit: Unit of the numbers, such as "bytes"; "" for none.
        sides: Names of the two values of a pair, such as ("predicted", "counted").
        are_parts: Whether the pairs are parts of one sum; the two sums are then shown in place of the parts.
    """

    what: str
    pairs: Sequence[tuple[Any, Any]]
    unit: str
    sides: tuple[str, str]
    are_parts: bool = False

    @property
    def unequal(self) -> list[tuple[Any, Any]]:
        """The pairs whose values differ."""
        return [(first, second) for first, second in self.pairs if first != second]

    @property
    def is_statement(self) -> bool:
        """Whether the values are True or False, not numbers."""
        return isinstance(self.pairs[0][0], bool)

    def badge(self) -> str:
        """Return a short text with the difference, summed over all pairs: ``0 apart``.

        For shapes and for True and False it is such as ``1 of 3 differ``; "" if all pairs agree.
        """
        numbers = [pair for pair in self.pairs if not isinstance(pair[0], (bool, list))]
        if not numbers:
            return f"{len(self.unequal)} of {len(self.pairs)} differ" if self.unequal else ""
        return f"{_number(sum(abs(first - second) for first, second in numbers))} apart"

    def sentence(self) -> str:
        """Return a text that says what was predicted and what was counted.

        It has the two sums if the pairs are parts of a sum, else the values of up to four pairs. For more pairs, and
        for shapes, it says how many pairs are equal. For True and False it is ``what``.
        """
        if self.is_statement:
            return self.what
        if isinstance(self.pairs[0][0], list):
            return f"{self.what}: {len(self.pairs) - len(self.unequal)} of {len(self.pairs)} equal"
        count = f"{len(self.pairs) - len(self.unequal)} of {len(self.pairs)}"
        if len(self.pairs) > _LISTED and not self.are_parts:
            return f"{self.what}: {count} equal"
        values = [[sum(own)] if self.are_parts else own for own in zip(*self.pairs)]
        shown = [f"{side} {' | '.join(map(_number, own))}" for side, own in zip(self.sides, values)]
        text = f"{self.what}: {' · '.join(shown)} {self.unit}".rstrip()
        return f"{text} ({count})" if self.are_parts and len(self.pairs) > 1 else text

    def details(self) -> str:
        """Return a text of several lines: the sentence with the badge, and below it each pair that differs."""
        apart = [f"  {_number(first)} and {_number(second)} {self.unit}".rstrip() for first, second in self.unequal]
        return "\n".join([f"{self.sentence()}: {self.badge()}", *apart])


class CheckLines:
    """Displays comparisons under a cell: one line each, with a badge that shows a tick if all values are equal.

    Args:
        comparisons: The comparisons, in the order in which they are shown.
    """

    def __init__(self, comparisons: Sequence[Comparison]):
        self._comparisons = comparisons

    def __repr__(self) -> str:
        return "\n".join(f"{_mark(not one.unequal, one.badge())} {one.sentence()}" for one in self._comparisons)

    def _repr_html_(self) -> str:
        return "".join(
            _badge_html(not one.unequal, one.badge(), one.sentence(), one.details()) for one in self._comparisons
        )


class Checks:
    """Collects the comparisons of a chapter.

    ``show``, at the end of a cell, displays the comparisons that were added since the last ``show``. As the last line
    of a cell, the object itself displays a summary of all comparisons.
    """

    def __init__(self) -> None:
        self._comparisons: list[Comparison] = []
        self._num_shown = 0

    def add(
        self,
        what: str,
        pairs: Iterable[tuple],
        unit: str = "bytes",
        sides: tuple[str, str] = ("predicted", "counted"),
        are_parts: bool = False,
    ) -> None:
        """Compare pairs of a prediction and a count.

        Args:
            what: A text that says what is compared, such as "bytes saved by one layer".
            pairs: Pairs (predicted, counted) of numbers, of shapes (lists), or of True and False.
            unit: Unit of the numbers; "" for none.
            sides: Names of the two values of a pair.
            are_parts: Whether the pairs are parts of one sum; the two sums are then shown in place of the parts.

        Raises:
            ValueError: There are no pairs, so nothing would be compared.
        """
        pairs = list(pairs)
        if not pairs:
            raise ValueError(f"{what}: there is nothing to compare")
        self._comparisons.append(Comparison(what, pairs, unit, sides, are_parts))

    def add_rows(self, what: str, predicted: Iterable[Row], counted: Iterable[Row]) -> None:
        """Compare the bytes of saved tensors, name by name.

        Args:
            what: A text that says what is compared, such as "bytes saved by one layer".
            predicted: Rows of the predicted tensors.
            counted: Rows of the counted tensors. A name that only one of the two has counts as 0 bytes in the other.
        """
        left, right = by_term(predicted), by_term(counted)
        pairs = [(left.get(term, 0), right.get(term, 0)) for term in {**left, **right}]
        self.add(what, [pair for pair in pairs if any(pair)], are_parts=True)

    def show(self) -> CheckLines | Fold:
        """Return the comparisons that were added since the last call, for a cell to display.

        Up to three comparisons are shown as a line each; for more there is one line, and a click shows all of them.
        """
        new = self._comparisons[self._num_shown :]
        self._num_shown = len(self._comparisons)
        return CheckLines(new) if len(new) <= 3 else _summed_up(new)

    def summary(self) -> Fold:
        """Return a line that says how many pairs are equal in all comparisons; a click shows each comparison."""
        return _summed_up(self._comparisons)

    def __repr__(self) -> str:
        return repr(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


def _summed_up(comparisons: Sequence[Comparison]) -> Fold:
    pairs = [pair for one in comparisons for pair in one.pairs if not isinstance(pair[0], bool)]
    equal = sum(one == other for one, other in pairs)
    apart = sum(bool(one.unequal) for one in comparisons)
    badge = f"{apart} of {len(comparisons)} comparisons are apart" if apart else "0 apart"
    line = f"{_mark(not apart, badge)} predicted = counted: {equal} of {len(pairs)}"
    return Fold(line, "\n".join(one.details() for one in comparisons), is_wrong=apart > 0)


def _mark(is_good: bool, badge: str) -> str:
    return f"{'✓' if is_good else '✗'} {badge}".rstrip()


def _badge_html(is_good: bool, badge: str, sentence: str, details: str = "") -> str:
    """Return one line as HTML; a wrong one is red, in bold and announced to screen readers."""
    colour, role = (_GOOD, "note") if is_good else (_BAD, "alert")
    look = "margin: 0.15em 0" if is_good else f"margin: 0.15em 0; {_WRONG}"
    more = "" if is_good or not details else f"<pre>{escape(details)}</pre>"
    return (
        f'<div class="actmem-check" role="{role}" style="{look}">'
        f'<span style="background: {colour}; color: #FFFFFF; border-radius: 0.8em; padding: 0.05em 0.6em; '
        f'margin-right: 0.6em; white-space: nowrap">{escape(_mark(is_good, badge))}</span>'
        f"{escape(sentence)}{more}</div>"
    )


def _number(value: Any) -> str:
    if isinstance(value, list):  # the sizes of a tensor
        return str(value)
    return f"{int(value):,}" if value == int(value) else f"{float(value):,}"
