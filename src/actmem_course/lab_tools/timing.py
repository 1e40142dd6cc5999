"""Time several candidates on the same work, in turns, so that what slows one slows all.

A machine's speed drifts: other programs, heat, clocks.  So each round runs every candidate once,
in a new random order, and candidates are compared within a round.  Forward and backward are timed
separately, and within backward the second runs of recomputed regions.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from math import comb
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from actmem.config import check_size
from actmem.recompute import around_second_runs
from actmem_course.ranks import Ranks


@dataclass(frozen=True)
class Sample:
    """One timed step.  recompute_seconds: the part of backward that recomputes forward."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Work:
    """One candidate: a step is ``backward(forward())``; ``finish()`` cleans up, untimed."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    finish: Callable[[], None] = lambda: None

    def under(self, context: Callable[[], AbstractContextManager[object]]) -> Work:
        """The same, forward and backward each in a ``context()`` of its own."""

        def inside(run: Callable) -> Callable:
            def entered(*args):
                with context():
                    return run(*args)

            return entered

        return Work(inside(self.forward), inside(self.backward), self.finish)


class Stopwatch:
    """Marks moments and gives the seconds between them.

    On ``"cuda"`` a moment is an event on the current stream, to be read after ``wait``.  Elsewhere
    it is wall-clock time.
    """

    def __init__(self, device: str):
        self._cuda = device == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._cuda else end - start

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def take_turns(
    candidates: Mapping[Any, Work],
    *,
    rounds: int,
    warm_up: int = 2,
    device: str = "cpu",
    meet: Callable[[], None] = lambda: None,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[Hashable, list[Sample]]:
    """Samples of each candidate, one a round, after ``warm_up`` rounds that do not count.

    meet: called before each step; a barrier if there are several ranks.  On CUDA an untimed step
    runs right before each timed one, so that the CPU is ahead of the GPU, as in training.  Raises
    ConfigError on a bad number of rounds.
    """
    check_size("rounds", rounds)
    check_size("warm_up", warm_up + 1)
    watch = Stopwatch(device)
    samples: dict[Hashable, list[Sample]] = {name: [] for name in candidates}
    with _timed_second_runs(watch) as second_runs, _no_garbage_collection() as collect:
        for number in range(-warm_up, rounds):
            # The same order on every rank, because they communicate.
            order = random.Random(number).sample(list(candidates), len(candidates))
            for name in order:
                sample = _step(candidates[name], watch, second_runs, meet, lead=device == "cuda")
                if number >= 0:
                    samples[name].append(sample)
            collect()
            on_round(number + warm_up + 1)
    return samples


def _step(work: Work, watch: Stopwatch, second_runs: list, meet: Callable[[], None], lead: bool) -> Sample:
    watch.wait()
    meet()
    if lead:
        work.backward(work.forward())
        work.finish()
    second_runs.clear()
    start = watch.mark()
    output = work.forward()
    middle = watch.mark()
    work.backward(output)
    end = watch.mark()
    watch.wait()
    work.finish()
    again = sum(watch.seconds(*pair) for pair in second_runs)
    return Sample(watch.seconds(start, middle), watch.seconds(middle, end), again)


@contextmanager
def _timed_second_runs(watch: Stopwatch) -> Iterator[list]:
    """Notes when each second run of a checkpoint starts and ends."""
    pairs: list = []

    @contextmanager
    def timed(function: Callable) -> Iterator[None]:
        start = watch.mark()
        yield
        pairs.append((start, watch.mark()))

    with around_second_runs(timed):
        yield pairs


@contextmanager
def _no_garbage_collection() -> Iterator[Callable[[], object]]:
    """Collects only when asked, between rounds, and only objects created since."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Spread:
    """The median of ``count`` samples, and the interval that holds the true median (95%, from 6 samples on)."""

    median: float
    low: float
    high: float
    count: int

    @property
    def margin(self) -> float:
        """Half the width of the interval: the number after ±."""
        return (self.high - self.low) / 2


def spread(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample."""
    ordered = sorted(samples)
    outside = _ranks_outside(len(ordered))
    return Spread(median(ordered), ordered[outside], ordered[-1 - outside], len(ordered))


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


#: The base runs once more in every round under this name: what differs is noise.
TWIN = "base once more"


@dataclass(frozen=True)
class Timings:
    """Samples by name, one a round, each of the rank that took longest.

    part: the seconds of ``Sample`` that are compared.  noise: of ``noise_of``, of that part.
    """

    samples: Mapping[Hashable, list[Sample]]
    noise: float
    part: str = "seconds"

    def medians(self, name: Hashable) -> dict[str, Any]:
        """One candidate's seconds of forward, of backward, and of both, named as in results."""
        fields = {"forward": "forward_seconds", "backward": "backward_seconds", "combined": "seconds"}
        return {
            f"{part}_seconds": median(getattr(one, field) for one in self.samples[name])
            for part, field in fields.items()
        }

    def over(self, name: Hashable, base: Hashable, factor: float = 1) -> dict[str, Any]:
        """One candidate's time over another's, times ``factor``, round by round; as JSON has it.

        Returns:
            value: the median of the ratio, less 1; low, high: 95% of its true median.
            is_real: False if the difference could be noise; noise: of the base, which ran twice a round.
            ratio, interval: the ratio itself, and its 95% in words; margin: half of that interval.
            within: what an overhead that is not real is below.
        """
        times = ([getattr(sample, self.part) for sample in self.samples[one]] for one in (name, base))
        found = spread([factor * one for one in ratios(*times)])
        return {
            "value": found.median - 1,
            "low": found.low - 1,
            "high": found.high - 1,
            "is_real": is_real(found, self.noise),
            "noise": self.noise,
            "ratio": found.median,
            "interval": f"{found.low:.2f}–{found.high:.2f}",
            "margin": found.margin,
            "within": max(self.noise, found.margin),
        }


def time_in_turns(
    work: Mapping[Any, Work],
    base: Hashable,
    ranks: Ranks,
    *,
    rounds: int,
    part: str = "seconds",
    on_round: Callable[[int], None] = lambda number: None,
) -> Timings:
    """Time all candidates in turns, ``base`` twice a round.  part: of ``Timings``.  Every rank must call it."""
    keep_freed_memory()
    # Meaningless values of emulated ranks may be denormal numbers, on which CPUs are slow.
    torch.set_flush_denormal(True)
    try:
        own = take_turns(
            {**work, TWIN: work[base]}, rounds=rounds, device=ranks.device,
            meet=(lambda: None) if ranks.emulated or ranks.size == 1 else dist.barrier, on_round=on_round,
        )  # fmt: skip
    finally:
        torch.set_flush_denormal(False)
    sent = {name: [astuple(sample) for sample in samples] for name, samples in own.items()}
    by_rank = [
        {name: [Sample(*times) for times in samples] for name, samples in of_rank.items()}
        for of_rank in ranks.gather(sent)
    ]
    # The slowest rank's sample of each step: the others waited for it.
    slowest = {
        name: [max(at_once, key=lambda one: one.seconds) for at_once in zip(*(samples[name] for samples in by_rank))]
        for name in own
    }
    twins, bases = ([getattr(sample, part) for sample in slowest[name]] for name in (TWIN, base))
    return Timings(slowest, noise_of(ratios(twins, bases)), part)


#: glibc's mallopt: the size from which a block gets a system call of its own, and what may stay free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
#: The largest value that glibc accepts for the first; larger blocks are still returned.
_LARGEST_KEPT_BLOCK = 32 << 20


def keep_freed_memory() -> bool:
    """Make the C library keep what this process frees.  False if malloc can't be configured (not glibc).

    It returns large blocks to the system when they are freed; the next tensor then gets new pages, each cleared
    first.  How often this happens depends on the order of frees, which differs between recomputation modes, and the
    effect is large enough to hide the difference between them.  GPU allocators keep freed memory, and so do the CPU
    allocators that training runs use.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(tune(_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK) and tune(_TRIM_THRESHOLD, 2**31 - 1))
