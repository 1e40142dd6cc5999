"""Time several candidates on the same work, in turns, so that what slows one slows all.

A machine's speed drifts: other programs, heat, clocks.  So each round runs every candidate once,
in a new random order, and candidates are compared within a round.  Forward and backward are timed
separately, and within backward the second runs of recomputed regions.
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

from actmem.config import check_size
from actmem.recompute import around_second_runs


@dataclass(frozen=True)
class Work:
    """One candidate: a step is ``backward(forward())``; ``finish()`` cleans up, untimed."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Sample:
    """One step.  recompute_seconds: the part of backward that runs forward again."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


class Stopwatch:
    """Marks moments and gives the seconds between them.

    On ``"cuda"`` a moment is an event on the current stream, to be read after ``wait``.  Elsewhere
    it is wall-clock time, or with ``cpu_time`` this process's processor time, which other programs
    hardly affect and which excludes waiting for other ranks.
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
    candidates: Mapping[Any, Work],
    *,
    rounds: int,
    warm_up: int = 2,
    device: str = "cpu",
    cpu_time: bool = False,
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
    watch = Stopwatch(device, cpu_time)
    samples: dict[Hashable, list[Sample]] = {name: [] for name in candidates}
    with _timed_second_runs(watch) as second_runs, _no_garbage_collection() as collect:
        for number in range(-warm_up, rounds):
            # The same order on every rank, because they exchange data.
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
