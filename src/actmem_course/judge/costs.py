"""What a call of the learner's block keeps, exchanges and takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from actmem.formulas.communication import Exchange
from actmem_course.judge.kept import kept
from actmem_course.judge.reward import Measure
from actmem_course.judge.workbench import Bench

_SECONDS, _FEWEST_ROUNDS, _MOST_ROUNDS = 4.0, 3, 15


@dataclass(frozen=True)
class Cost:
    """What one call of a block costs a rank.  exchanged: payload bytes of forward and backward.

    milliseconds: of the fastest round.  noise: by which share of it the median round is slower.
    """

    bytes: int
    collectives: int
    exchanged_bytes: int
    milliseconds: float
    noise: float = 0.0


def costs(
    b: Bench, functions: Mapping[str, Callable[..., Tensor]], x: Tensor, weights: Sequence[Tensor]
) -> dict[str, Cost]:
    """Count and time each ``function(x, *weights)``, forward and backward.  Every rank must call it.

    The functions take turns, and the fastest round counts: what else a machine does only adds time.
    There are as many rounds as a few seconds have room for.
    """
    parameters = [w.detach().clone().requires_grad_() for w in weights]

    def once(function: Callable[..., Tensor]) -> float:
        b.gather(None)  # all ranks begin together
        start = time.perf_counter()
        y = function(x.detach().clone().requires_grad_(), *parameters)
        y.backward(torch.ones_like(y))
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        b.progress()
        return 1000 * (time.perf_counter() - start)

    counted, seen = {}, {}
    for name, function in functions.items():
        counted[name] = kept(b, function, x, weights).bytes
        with b.watching() as seen[name]:
            once(function)
    with one_thread():
        turns: list[dict[str, float]] = []
        start = time.perf_counter()
        while (
            len(turns) <= _FEWEST_ROUNDS
            or len(turns) <= _MOST_ROUNDS
            and max(b.gather(time.perf_counter() - start)) < _SECONDS
        ):
            turns.append({name: once(function) for name, function in functions.items()})
            b.progress(f"round {len(turns)}")
        del turns[0]  # the first warms up
    return {
        name: Cost(
            counted[name],
            len(seen[name].collectives),
            sum(c.payload_bytes for c in seen[name].collectives),
            min(turn[name] for turn in turns),
            median(turn[name] for turn in turns) / min(turn[name] for turn in turns) - 1,
        )
        for name in functions
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrix products on one core each: threads that wait for a busy core would be timed instead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compared(yours: Cost, ours: Cost, formula_bytes: int, exchanges: Sequence[Exchange]) -> tuple[Measure, ...]:
    """The measures of a block, on this rank.  exchanges: those that the formula has for it."""
    payload = sum(exchange.payload_bytes * exchange.count for exchange in exchanges)
    measures = [Measure("kept for backward", "B", {"formula": formula_bytes, "yours": yours.bytes, "ours": ours.bytes})]
    if exchanges:
        number = sum(exchange.count for exchange in exchanges)
        exchanged = {"formula": payload, "yours": yours.exchanged_bytes, "ours": ours.exchanged_bytes}
        measures.append(Measure("exchanged", "B", exchanged))
        measures.append(
            Measure("collectives", "", {"formula": number, "yours": yours.collectives, "ours": ours.collectives})
        )
    return (*measures, time_measure(yours, ours))


def time_measure(yours: Cost, ours: Cost) -> Measure:
    """How long a forward and a backward took."""
    times = {"yours": yours.milliseconds, "ours": ours.milliseconds}
    return Measure("forward + backward", "ms", times, max(yours.noise, ours.noise))
