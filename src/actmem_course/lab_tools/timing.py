"""Time several candidates (such as a layer in several modes) in turns, so that whatever slows the machine slows all.

A machine's speed drifts with other programs, heat and clock rates.  So each round runs every candidate once, in a new
random order, and candidates are compared within a round.  Forward and backward are timed separately.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import astuple, dataclass
from math import comb
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from actmem.config import check_size
from actmem_course.lab_tools.output import show_progress
from actmem_course.ranks import Ranks

#: Rounds before the timed ones, in which everything is made that is made only once.
WARM_UP = 2


@dataclass(frozen=True)
class Sample:
    """The times of one step.

    Attributes:
        forward_seconds: Seconds of forward.
        backward_seconds: Seconds of backward.
    """

    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Work:
    """Code to be timed.  One step runs ``backward(forward())``, and then ``finish()``, which isn't timed.

    Attributes:
        forward: runs forward, and returns its output.
        backward: runs backward; it takes forward's output.
        finish: cleans up after a step, such as freeing gradients; by default it does nothing.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    finish: Callable[[], None] = lambda: None

    def under(self, context: Callable[[], ContextDecorator]) -> Work:
        """Return a copy of this work in which forward and backward each run inside a ``context()`` of their own.

        Args:
            context: makes a context manager that also works as a decorator, such as a function with @contextmanager.
        """
        return Work(context()(self.forward), context()(self.backward), self.finish)


class Stopwatch:
    """Marks moments and returns the seconds between two of them.

    On "cuda" a moment is an event on the current stream; call ``wait`` before you read the seconds. On other devices a
    moment is the wall-clock time.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str):
        self._cuda = device == "cuda"

    def mark(self) -> Any:
        """Return the current moment, to be given to ``seconds``."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments; on CUDA call ``wait`` before.

        Args:
            start: the first moment, from ``mark``.
            end: the second moment, from ``mark``.
        """
        return start.elapsed_time(end) / 1000 if self._cuda else end - start

    def wait(self) -> None:
        """Wait until the GPU has reached every moment that was marked."""
        if self._cuda:
            torch.cuda.synchronize()


def take_turns(
    candidates: Mapping[Any, Work],
    *,
    rounds: int,
    warm_up: int = WARM_UP,
    device: str = "cpu",
    meet: Callable[[], None] = lambda: None,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[Hashable, list[Sample]]:
    """Time all candidates in turns on this rank.

    Python's garbage collector runs only between rounds. On CUDA an untimed step runs right before each timed one, so
    that the CPU is ahead of the GPU, as in training.

    Args:
        candidates: the work of each candidate, by its name.
        rounds: how many rounds are timed.
        warm_up: how many untimed rounds run before the timed ones.
        device: "cpu" or "cuda".
        meet: called before each step; a barrier if there are several ranks.
        on_round: called after each round, untimed ones too, with the round's number, from 1 on.

    Returns:
        For each candidate a list of samples, one for each round.

    Raises:
        ConfigError: The number of rounds is not allowed.
    """
    check_size("rounds", rounds)
    watch = Stopwatch(device)
    samples: dict[Hashable, list[Sample]] = {name: [] for name in candidates}
    gc.freeze()  # collect looks only at what is made from here on
    gc.disable()
    try:
        for number in range(-warm_up, rounds):
            gc.collect()
            # The same order on every rank, because they communicate.
            for name in random.Random(number).sample(list(candidates), len(candidates)):
                sample = _step(candidates[name], watch, meet, lead=device == "cuda")
                if number >= 0:
                    samples[name].append(sample)
            on_round(number + warm_up + 1)
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def _step(work: Work, watch: Stopwatch, meet: Callable[[], None], lead: bool) -> Sample:
    watch.wait()
    meet()
    if lead:
        work.backward(work.forward())
        work.finish()
    start = watch.mark()
    output = work.forward()
    middle = watch.mark()
    work.backward(output)
    end = watch.mark()
    watch.wait()
    work.finish()
    return Sample(watch.seconds(start, middle), watch.seconds(middle, end))


@dataclass(frozen=True)
class Timings:
    """The times of all candidates.

    Attributes:
        samples: for each candidate, by name, one sample per round: that of the slowest rank in this round.
        part: which seconds ``over`` compares: "seconds" (both passes), "forward_seconds" or "backward_seconds".
    """

    samples: Mapping[Hashable, list[Sample]]
    part: str = "seconds"

    def medians(self, name: Hashable) -> dict[str, float]:
        """Return the medians of one candidate's times over all rounds, in seconds.

        Args:
            name: the candidate, a key of ``samples``.

        Returns: the medians under "forward_seconds", "backward_seconds" and "combined_seconds" (both passes).
        """
        fields = {"forward": "forward_seconds", "backward": "backward_seconds", "combined": "seconds"}
        return {
            f"{part}_seconds": median(getattr(sample, field) for sample in self.samples[name])
            for part, field in fields.items()
        }

    def over(self, name: Hashable, base: Hashable) -> dict[str, Any]:
        """Compare two candidates round by round: how much longer does ``name`` take than ``base``?

        Args:
            name: the candidate to compare, a key of ``samples``.
            base: the candidate to compare it with, a key of ``samples``.

        Returns: the dict of the function ``over``: "value" is the median increase (0.04 is 4% longer), "low" and "high"
            are the ends of its 95% confidence interval, and "is_real" is False if the difference could be noise.
        """
        return over(*([getattr(sample, self.part) for sample in self.samples[one]] for one in (name, base)))


def over(times: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Compute how much longer one candidate takes than another, with a confidence interval.

    Each time is divided by the base's time of the same round, so that whatever slowed both cancels.

    Args:
        times: the candidate's seconds, one number for each round.
        base: the seconds of the candidate to compare with, in the same rounds.

    Returns: a dict that labs write to JSON, with these keys:
        "value": the median of these ratios, minus 1; 0.04 is 4% longer.
        "low", "high": the ends of the 95% confidence interval of that median, minus 1.
        "margin": half the width of that interval.
        "is_real": False if the difference could be noise.
        "within": the larger of |low| and |high|: a difference that could be noise is smaller than this.
    """
    ratios = sorted(seconds / base_seconds for seconds, base_seconds in zip(times, base, strict=True))
    outside = _ranks_outside(len(ratios))
    value, low, high = median(ratios) - 1, ratios[outside] - 1, ratios[-1 - outside] - 1
    margin, within = (high - low) / 2, max(abs(low), abs(high))
    # Below 6 samples even the widest interval holds less than 95%.
    is_real = len(ratios) >= 6 and abs(value) > margin and (low > 0 or high < 0)
    return {"value": value, "low": low, "high": high, "margin": margin, "is_real": is_real, "within": within}


def _ranks_outside(count: int) -> int:
    """Return how many of ``count`` ordered samples may be cut off at each end of the 95% interval.

    Each sample is above the true median as often as below it, so the number below it is binomial: no assumption about
    the noise is needed.
    """
    outside, tail = 0, 1
    while 2 * (tail + comb(count, outside + 1)) <= 0.05 * 2**count:
        outside += 1
        tail += comb(count, outside)
    return outside


def time_in_turns(work: Mapping[Any, Work], ranks: Ranks, *, rounds: int, part: str = "seconds") -> Timings:
    """Time all candidates in turns on all ranks together, and show progress. Every rank must call this function.

    Args:
        work: the work of each candidate, by its name.
        ranks: this rank, with its connection to the other ranks.
        rounds: how many rounds are timed; in each round every candidate runs once.
        part: which seconds ``Timings.over`` compares: "seconds" (both passes), "forward_seconds" or "backward_seconds".

    Returns: for each candidate one sample per round: that of the rank that was slowest in this round.
    """
    keep_freed_memory()
    # Meaningless values of emulated ranks may be denormal numbers, on which CPUs are slow.
    torch.set_flush_denormal(True)
    meet = (lambda: None) if ranks.emulated or ranks.size == 1 else dist.barrier

    def say(number: int) -> None:
        show_progress(ranks.rank, f"timing: round {number} of {rounds + WARM_UP}")

    rank_samples = take_turns(work, rounds=rounds, device=ranks.device, meet=meet, on_round=say)
    show_progress(ranks.rank)
    torch.set_flush_denormal(False)
    slowest = {}
    for name, samples in rank_samples.items():
        by_rank = ranks.gather([astuple(sample) for sample in samples])
        # Of each step the rank that took longest: the others waited for it.
        slowest[name] = [max((Sample(*one) for one in step), key=lambda one: one.seconds) for step in zip(*by_rank)]
    return Timings(slowest, part)


def keep_freed_memory() -> bool:
    """Make the C library keep memory that this process frees, because returning it would disturb times on a CPU.

    By default the C library returns large freed blocks to the system, and the next tensor then gets new pages that must
    be cleared first. How often that happens depends on the order of frees, which differs between modes of
    recomputation; the effect is larger than the difference between the modes. GPU allocators, and the CPU allocators
    that training runs use, keep freed memory too.

    Returns: whether the C library accepted both settings; only glibc does.
    """
    mmap_threshold, trim_threshold = -3, -1  # names of malloc.h, which ctypes doesn't know
    try:
        tune = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    # The largest value that glibc accepts for the first; larger blocks are still returned.
    return bool(tune(mmap_threshold, 32 << 20) and tune(trim_threshold, 2**31 - 1))
