"""Bytes, predicted and measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction

from actmem.rows import MemorySample

Number = int | float | Fraction


@dataclass(frozen=True)
class Table2Result:
    """One configuration of table 2 on one rank.

    predicted_bytes: the paper's formula.  extra_bytes: what the paper leaves out, predicted as
    well.  measured_bytes: everything that autograd keeps.  exact: every single term agrees.
    """

    configuration: str
    formula: str
    tensor_parallel_size: int
    rank: int
    predicted_bytes: int
    extra_bytes: int
    measured_bytes: int
    difference_bytes: int
    exact: bool
    disagreement: str


@dataclass(frozen=True)
class OtherLine:
    """What another implementation's layer keeps at one shape, by its formula and counted; None and why if it isn't installed."""

    name: str
    dtype: str
    sizes: str
    formula: str
    predicted_bytes: int
    measured_bytes: int | None
    why: str
    unavailable: str


@dataclass(frozen=True)
class PipelineResult:
    """One rank's pipeline step.  measured_bytes: held by graphs when the rank held most, so predicted + extra.

    output_bytes, buffer_bytes: what torch's runtime held at that moment besides the graphs.
    samples: what the rank held after each action.
    """

    rank: int
    pipeline_rank: int
    predicted_in_flight: int
    measured_in_flight: int
    predicted_bytes: int
    extra_bytes: int
    measured_bytes: int
    difference_bytes: int
    output_bytes: int
    buffer_bytes: int
    exact: bool
    disagreement: str
    order_as_drawn: bool
    samples: list[MemorySample]


@dataclass(frozen=True)
class ModeCost:
    """One mode's training.  kept_bytes: of one microbatch on this rank; formula_bytes: predicted; losses: by step."""

    name: str
    formula_bytes: int
    kept_bytes: int
    step_seconds: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class PaperEntry:
    """One number of the paper beside ours.

    paper: as printed, or by a formula as printed; None where the paper gives no number.
    ours_formula: predicted.  extra: predicted as well, but left out by the paper.
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
        return None if self.measured is None else self.measured - self.predicted - self.extra

    @property
    def predicted(self) -> Number:
        """ours_formula, of an entry that has one."""
        assert self.ours_formula is not None
        return self.ours_formula

    @property
    def printed(self) -> Number | None:
        """What the paper prints, if that is a number."""
        return self.paper if isinstance(self.paper, Number) else None

    @property
    def difference_from_paper(self) -> Number | None:
        """Ours minus the paper's; None where one of them is not a number."""
        if self.ours_formula is None or not isinstance(self.paper, Number):
            return None
        # A printed number is a decimal, and a difference of decimals is read as one.
        return (
            float(self.ours_formula) - self.paper if isinstance(self.paper, float) else self.ours_formula - self.paper
        )

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
