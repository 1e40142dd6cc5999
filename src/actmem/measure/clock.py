"""Times of several candidates on the same work, taken in turns so that what slows one slows all.

A machine's speed drifts: other programs, heat, clocks.  So each round runs every candidate once,
in an order shuffled anew, and candidates are compared within a round.  Forward and backward are
timed apart, and inside backward the second run of a recomputed region.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from actmem import recompute
from actmem.config import check_size
from actmem.measure.replace import replaced


@dataclass(frozen=True)
class Work:
    """One candidate: ``backward(forward())`` is one step of it; ``finish()`` tidies up, untimed."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Sample:
    """One step.  recompute_seconds is the part of backward that runs forward again."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


class Stopwatch:
    """Marks moments and tells the seconds between them.

    On ``"cuda"`` a moment is an event on the current stream, to be read after ``wait``.  Elsewhere
    it is the wall clock, or with ``cpu_time`` the processor time of this process, which other
    programs on the same cores hardly change, and which does not count waiting for other ranks.
    """

    def __init__(self, device: str, cpu_time: bool = False):
        self._cuda = device == "cuda"
        self._read = time.process_time if cpu_time else time.perf_counter

    def mark(self) -> Any:
        if not self._cuda:
            return self._read()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._cuda else end - start

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def take_turns(
    candidates: Mapping[Hashable, Work],
    *,
    rounds: int,
    warm_up: int = 2,
    device: str = "cpu",
    cpu_time: bool = False,
    meet: Callable[[], None] = lambda: None,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[Hashable, list[Sample]]:
    """Samples of each candidate, one a round, after ``warm_up`` rounds that do not count.

    meet: called before each step; on several ranks a barrier.  On CUDA one step more runs right
    before each timed one, so that the processor is ahead of the GPU as it is in training.
    Raises ConfigError on a bad number of rounds.
    """
    check_size("rounds", rounds)
    check_size("warm_up", warm_up + 1)
    watch, samples = Stopwatch(device, cpu_time), {name: [] for name in candidates}
    with _timed_second_runs(watch) as second_runs, _no_garbage_collection() as collect:
        for number in range(-warm_up, rounds):
            # The same order on every rank: they exchange data.
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
    """Notes when the checkpoint function starts and ends each second run."""
    pairs: list = []

    def timed(run_again):
        def run(region):
            start = watch.mark()
            run_again(region)
            pairs.append((start, watch.mark()))

        return run

    with replaced(recompute._Region, "_run_again", timed):
        yield pairs


@contextmanager
def _no_garbage_collection() -> Iterator[Callable[[], None]]:
    """Collects only when asked, between rounds, and only what has been made since."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda: gc.collect() and None
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()

