"""One number of the paper beside ours: the form that tables and JSON of ``measure_paper`` share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction

Number = int | float | Fraction


@dataclass(frozen=True)
class Entry:
    """One quantity of one model.

    paper: as printed, or by a formula as printed; None where the paper gives no number.
    ours_formula: predicted.  extra: predicted beside it, because the paper leaves it out.
    measured: None where nothing was measured.  disagreement: which terms differ, if any do.
    pipeline_rank: in figure 9.  note: one line for the reader.
    """

    section: str
    model: str
    quantity: str
    unit: str
    paper: Number | str | None = None
    ours_formula: Number | None = None
    extra: int = 0
    measured: Number | None = None
    disagreement: str = ""
    pipeline_rank: int | None = None
    note: str = ""

    @property
    def difference(self) -> Number | None:
        """Measured minus predicted; None where nothing was measured."""
        return None if self.measured is None else self.measured - self.ours_formula - self.extra

    @property
    def difference_from_paper(self) -> Number | None:
        """Ours minus the paper's; None where one of them is not a number."""
        if self.ours_formula is None or not isinstance(self.paper, Number):
            return None
        # A printed number is a decimal, and a difference of decimals is read as one.
        return float(self.ours_formula) - self.paper if isinstance(self.paper, float) else self.ours_formula - self.paper

    @property
    def exact(self) -> bool | None:
        """Whether measured equals predicted, term by term; None where nothing was measured."""
        return None if self.measured is None else not (self.difference or self.disagreement)

    def as_json(self) -> dict:
        """All fields and the three properties, with plain numbers only."""
        computed = {name: getattr(self, name) for name in ("difference", "difference_from_paper", "exact")}
        return {name: _plain(value) for name, value in {**asdict(self), **computed}.items()}


def _plain(value: object) -> object:
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value
