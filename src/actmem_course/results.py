"""What labs measure, a frozen class for each: from the measurement to the table, the figure and ``--json``.  Torch-free.

``read`` makes them again from their JSON.  Seconds are medians, of the rank that took longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Number = int | float | Fraction
_Result = TypeVar("_Result", bound="DataclassInstance")


def read(kind: type[_Result], values: Mapping) -> _Result:
    """A result from its JSON object; what ``kind`` has no field for is left out."""
    hints = get_type_hints(kind)
    return kind(**{name: _made(hints[name], value) for name, value in values.items() if name in hints})


def _made(hint: Any, value: Any) -> Any:
    """A field's value, with the results that are in it."""
    for part in (hint, *get_args(hint)):
        if not (isinstance(part, type) and is_dataclass(part)):
            continue
        if isinstance(value, Mapping):
            return read(part, value)
        if isinstance(value, list):
            return [read(part, one) for one in value]
    return value


def plain(result: object) -> Any:
    """A result as JSON can hold it, for ``json.dumps(…, default=plain)``: its fields and what follows from them.

    Without fields that aren't in its ``repr``.
    """
    if isinstance(result, Fraction):
        return result.numerator if result.denominator == 1 else float(result)
    if not is_dataclass(result) or isinstance(result, type):
        raise TypeError(f"{type(result).__name__} is no result")
    computed = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {name: getattr(result, name) for name in [f.name for f in fields(result) if f.repr] + computed}


@dataclass(frozen=True)
class MemorySample:
    """What a pipeline rank held right after one action of its schedule.

    kind: "F" or "B".  in_flight: chunk-microbatches whose forward is done and backward is not.
    kept_bytes: held by graphs.  output_bytes, buffer_bytes: held by torch's runtime in addition.
    """

    kind: str
    stage: int
    microbatch: int
    in_flight: int
    kept_bytes: int
    output_bytes: int
    buffer_bytes: int


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
        return None if self.measured is None else self.measured - (self.ours_formula or 0) - self.extra

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


@dataclass(frozen=True)
class ParityResult:
    """One form on one rank, against the unsharded layer with the same weights and input.

    largest_error: over the output, the input's gradient and every parameter's.  forward, backward:
    exchanges of each kind.  partial_gradients: parameters whose gradient was not the dense
    layer's before ``reduce_partial_gradients``.
    """

    form: str
    tensor_parallel_size: int
    rank: int
    largest_error: float
    exact: bool
    forward: dict[str, int]
    backward: dict[str, int]
    partial_gradients: list[str]


@dataclass(frozen=True)
class ExchangeCount:
    """Exchanges of one layer, forward and backward, on this rank: by formula, and counted.

    predicted, measured: how many of each kind.  Bytes are what a ring sends for all together.
    """

    name: str
    recompute: str
    predicted: dict[str, int]
    measured: dict[str, int]
    predicted_wire_bytes: int
    measured_wire_bytes: int

    @property
    def exact(self) -> bool:
        same_bytes = self.predicted_wire_bytes == self.measured_wire_bytes
        return same_bytes and self.predicted == self.measured

    @property
    def difference(self) -> str:
        """What does not agree, in words."""
        return f"{self.name}, {self.recompute}: by formula {self.predicted}, counted {self.measured}"


@dataclass(frozen=True)
class SocketCount:
    """Bytes that all ranks together sent.

    predicted_bytes: data, as around a ring.  header_bytes: what gloo adds, predicted too.
    sent_bytes: what the sockets say.
    """

    name: str
    predicted_bytes: int
    header_bytes: int
    sent_bytes: int

    @property
    def exact(self) -> bool:
        return self.sent_bytes == self.predicted_bytes + self.header_bytes

    @property
    def difference(self) -> str:
        """What does not agree, in words."""
        return f"{self.name}: {self.predicted_bytes:,} + {self.header_bytes:,} bytes by formula, {self.sent_bytes:,} on the sockets"


@dataclass(frozen=True)
class Sample:
    """One timed step.  recompute_seconds: the part of backward that runs forward again."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Overhead:
    """One time over another, minus 1, compared round by round.  low, high: 95% of its true median.

    is_real: False if it could be noise.  noise: of the baseline, which ran twice a round.
    """

    value: float
    low: float
    high: float
    is_real: bool
    noise: float

    @property
    def ratio(self) -> float:
        """The one time over the other."""
        return 1 + self.value

    @property
    def interval(self) -> str:
        """95% of the ratio's true median."""
        return f"{1 + self.low:.2f}–{1 + self.high:.2f}"

    @property
    def margin(self) -> float:
        """Half the interval: what stands after ±."""
        return (self.high - self.low) / 2

    @property
    def within(self) -> float:
        """What an overhead that is not real is below."""
        return max(self.noise, self.margin)


@dataclass(frozen=True)
class SpeedLine:
    """One way to run a layer, timed: medians, and quartiles.  recompute_seconds are part of backward_seconds.

    over: its time over the baseline's; None of the baseline.  flops_overhead: by formula.  predicted_bytes: by
    formula, what the paper leaves out included.  finite: False if the output had an infinity or a NaN.
    """

    name: str
    sequence_parallel: bool
    recompute: str
    literal: bool
    forward_seconds: float
    forward_quartiles: tuple[float, float]
    backward_seconds: float
    backward_quartiles: tuple[float, float]
    recompute_seconds: float
    combined_seconds: float
    combined_quartiles: tuple[float, float]
    over: Overhead | None
    noise: float
    flops_overhead: float
    paper_overhead_percent: int | None
    predicted_bytes: int
    held_bytes: int
    peak_bytes: int
    allocated_bytes: int | None
    requested_bytes: int | None
    finite: bool

    @property
    def exact(self) -> bool:
        """True if the layer holds what the formula says, to the byte."""
        return self.held_bytes == self.predicted_bytes


@dataclass(frozen=True)
class PeerLine:
    """One library's layer in one mode.

    unavailable: why it did not run; the rest is None then.  ours: our time over this one's, per sequence;
    None of ours.  over: this one's time over its own without recomputation; None if that did not run.
    over_selective: the same against its own selective recomputation.  noise: of our layer, which ran
    twice a round.  sequences: how many the ranks ran together.  wide_mask_bytes: of held_bytes, what masks of
    ``F.dropout`` on a CPU take beyond 1 byte an element.
    """

    mode: str
    name: str
    unavailable: str = ""
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    combined_seconds: float | None = None
    ours: Overhead | None = None
    over: Overhead | None = None
    over_selective: Overhead | None = None
    noise: float | None = None
    sequences: int = 1
    held_bytes: int | None = None
    wide_mask_bytes: int = 0
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    requested_bytes: int | None = None
    finite: bool | None = None


@dataclass(frozen=True)
class TimedPair:
    """Two ways to do the same, timed in turns.  over: the second's seconds over the first's.

    hidden: the share of the exchanges' own time that overlap takes off backward; None if that could be noise.
    """

    first: str
    second: str
    first_seconds: float
    second_seconds: float
    over: Overhead
    hidden: float | None = None


@dataclass(frozen=True)
class Claim:
    """What must hold on a GPU: one sentence, what was measured, and whether it holds."""

    claim: str
    measured: str
    holds: bool
