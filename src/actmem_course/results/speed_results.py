"""Times.  Seconds are medians, of the rank that took longest.

``overhead`` and ``ratio`` compare round by round; their ``_low`` and ``_high`` hold the true median (95%),
and ``is_real`` is False if the difference could be noise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overhead:
    """One time over another, minus 1.  low, high: 95% of its true median.  is_real: False if it could be noise."""

    value: float
    low: float
    high: float
    is_real: bool
    noise: float

    @property
    def margin(self) -> float:
        """Half the interval: what stands after ±."""
        return (self.high - self.low) / 2

    @property
    def within(self) -> float:
        """What an overhead that is not real is below."""
        return max(self.noise, self.margin)


def _overhead(
    value: float | None, low: float | None, high: float | None, is_real: bool, noise: float | None
) -> Overhead | None:
    if value is None or low is None or high is None or noise is None:
        return None
    return Overhead(value, low, high, is_real, noise)


@dataclass(frozen=True)
class SpeedLine:
    """One way to run a layer, timed.  recompute_seconds are part of backward_seconds.

    overhead: time over the baseline's, minus 1.  flops_overhead: by formula.  predicted_bytes: by
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
    overhead: float | None
    overhead_low: float | None
    overhead_high: float | None
    is_real: bool
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

    @property
    def over(self) -> Overhead | None:
        """The overhead with all that belongs to it; None for the baseline."""
        return _overhead(self.overhead, self.overhead_low, self.overhead_high, self.is_real, self.noise)


@dataclass(frozen=True)
class PeerLine:
    """One library's layer in one mode.

    unavailable: why it did not run; the rest is None then.  ratio: our time over this one's, per
    sequence.  overhead: this one's time over its own without recomputation, minus 1; None if that
    did not run.  beside_selective: the same against its own selective recomputation.  noise: of our
    layer, which ran twice a round.  sequences: how many the ranks ran together.  wide_mask_bytes: of
    held_bytes, what masks of ``F.dropout`` on a CPU take beyond 1 byte an element.  bytes_per_sequence:
    held_bytes for each of the sequences of one microbatch that the ranks share.
    """

    mode: str
    name: str
    unavailable: str = ""
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    combined_seconds: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    is_real: bool = False
    overhead: float | None = None
    overhead_low: float | None = None
    overhead_high: float | None = None
    overhead_is_real: bool = False
    beside_selective: float | None = None
    beside_selective_low: float | None = None
    beside_selective_high: float | None = None
    beside_selective_is_real: bool = False
    noise: float | None = None
    sequences: int | None = None
    held_bytes: int | None = None
    wide_mask_bytes: int = 0
    bytes_per_sequence: float | None = None
    peak_bytes: int | None = None
    allocated_bytes: int | None = None
    requested_bytes: int | None = None
    finite: bool | None = None

    @property
    def over(self) -> Overhead | None:
        """The overhead with all that belongs to it."""
        return _overhead(self.overhead, self.overhead_low, self.overhead_high, self.overhead_is_real, self.noise)

    @property
    def over_selective(self) -> Overhead | None:
        """The same against its own selective recomputation."""
        low, high, is_real = self.beside_selective_low, self.beside_selective_high, self.beside_selective_is_real
        return _overhead(self.beside_selective, low, high, is_real, self.noise)


@dataclass(frozen=True)
class TimedPair:
    """Two ways to do the same, timed in turns.  ratio: the second's seconds over the first's.

    hidden: the share of the exchanges' own time that overlap takes off backward; None if ``is_real`` is False.
    """

    first: str
    second: str
    first_seconds: float
    second_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    is_real: bool
    noise: float
    hidden: float | None = None

    @property
    def over(self) -> Overhead:
        """The ratio as an overhead."""
        return Overhead(self.ratio - 1, self.ratio_low - 1, self.ratio_high - 1, self.is_real, self.noise)


@dataclass(frozen=True)
class ScalingPoint:
    """One size of one axis, one step: seconds; FLOPs and bytes of this rank, by formula and counted."""

    axis: str
    value: int
    seconds: float
    quartiles: tuple[float, float]
    predicted_flops: int
    measured_flops: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def exact(self) -> bool:
        return self.predicted_flops == self.measured_flops and self.predicted_bytes == self.measured_bytes


@dataclass(frozen=True)
class ScalingSlopes:
    """Exponents of one axis: of the seconds, the FLOPs and the bytes; FLOPs and bytes agree with their formulas
    point by point, so each has one slope.  spread: of the seconds' slope over their quartiles."""

    axis: str
    seconds: float
    spread: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Claim:
    """What must hold on a GPU: one sentence, what was measured, and whether it holds."""

    claim: str
    measured: str
    holds: bool
