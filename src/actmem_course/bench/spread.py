"""Medians, quartiles, and how much to trust the median of a few noisy samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from statistics import median, quantiles


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of ``count`` samples, and the interval that holds the true median (95%, from 6 samples on)."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float
    count: int

    @property
    def margin(self) -> float:
        """Half the width of the interval: the number after ±."""
        return (self.high - self.low) / 2

    def times(self, factor: float) -> Spread:
        """Of the same samples, each multiplied by a positive factor."""
        scaled = {name: factor * value for name, value in asdict(self).items() if name != "count"}
        return replace(self, **scaled)


def spread(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample."""
    ordered = sorted(samples)
    first, _, third = quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    outside = _ranks_outside(len(ordered))
    return Spread(median(ordered), first, third, ordered[outside], ordered[-1 - outside], len(ordered))


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each sample divided by the base's sample of the same round, so that what slowed both cancels."""
    return [sample / other for sample, other in zip(samples, base, strict=True)]


def noise_of(twin_ratios: Sequence[float]) -> float:
    """How far from 1 the ratio of a candidate to itself can lie, as a share.

    twin_ratios: the same candidate's second run over its first, by round.  The true ratio is 1, so
    whatever else its interval covers is noise.
    """
    found = spread(twin_ratios)
    return max(abs(found.low - 1), abs(found.high - 1))


def is_real(ratio: Spread, noise: float) -> bool:
    """True if a ratio differs from 1 by more than the noise and more than half its own interval,
    and that interval lies on one side of 1.  Never true of fewer than 6 samples."""
    return ratio.count >= 6 and abs(ratio.median - 1) > max(noise, ratio.margin) and (ratio.low > 1 or ratio.high < 1)


def _ranks_outside(count: int) -> int:
    """How many of ``count`` ordered samples may be cut off at each end of the 95% interval.

    Each sample is above the true median as often as below it, so the number below it is
    binomial: no assumption about the noise is needed.  Below 6 samples even the widest
    interval holds less than 95%.
    """
    outside, tail = 0, 1
    while 2 * (tail + comb(count, outside + 1)) <= 0.05 * 2**count:
        outside += 1
        tail += comb(count, outside)
    return outside
