"""Modules compared on the same work: times taken in turns, bytes held, bytes at the peak."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actmem.measure.ledger import record
from actmem_course.bench.clock import Sample, Work, take_turns
from actmem_course.bench.heap import keep_freed_memory
from actmem_course.bench.peak import clear_gradients, measure_memory
from actmem_course.bench.spread import Spread, is_real, noise_of, ratios, spread
from actmem_course.ranks import Ranks
from actmem_course.results import Overhead

#: The base runs once more in every round under this name: what differs is noise.
TWIN = "base once more"


@dataclass(frozen=True)
class Runner:
    """A module and the input that it runs on."""

    module: nn.Module
    leaf: Tensor

    def work(self) -> Work:
        return Work(lambda: self.module(self.leaf), _backward, lambda: clear_gradients(self.module, self.leaf))


def _backward(output: Tensor) -> None:
    output.backward(output.detach())


@dataclass(frozen=True)
class Race:
    """Samples by name, one a round, each of the rank that took longest.  noise: see bench.spread."""

    samples: Mapping[Hashable, list[Sample]]
    noise: float

    def spread(self, name: Hashable, part: str = "seconds") -> Spread:
        """Of one candidate; part: an attribute of Sample."""
        return spread(self._seconds(name, part))

    def over(self, name: Hashable, base: Hashable, part: str = "seconds", factor: float = 1) -> Overhead:
        """One candidate's time over another's, times ``factor``, as an overhead."""
        ratio = self.ratio(name, base, part).times(factor)
        return Overhead(ratio.median - 1, ratio.low - 1, ratio.high - 1, is_real(ratio, self.noise), self.noise)

    def ratio(self, name: Hashable, base: Hashable, part: str = "seconds") -> Spread:
        """Seconds of one candidate over another's, compared round by round."""
        return spread(ratios(self._seconds(name, part), self._seconds(base, part)))

    def _seconds(self, name: Hashable, part: str) -> list[float]:
        return [getattr(sample, part) for sample in self.samples[name]]


def race(runners: Mapping[Any, Runner], base: Hashable, ranks: Ranks, **options) -> Race:
    """Time all runners in turns, ``base`` twice a round.  options: as in ``race_of``."""
    return race_of({name: runner.work() for name, runner in runners.items()}, base, ranks, **options)


def race_of(
    work: Mapping[Any, Work],
    base: Hashable,
    ranks: Ranks,
    *,
    rounds: int,
    warm_up: int = 2,
    cpu_time: bool = False,
    part: str = "seconds",
    on_round: Callable[[int], None] = lambda number: None,
) -> Race:
    """Time all candidates in turns, ``base`` twice a round.  Every rank must call it.

    cpu_time: take the process's own processor time, not the wall clock (CPU only).  part: the
    field of Sample that the noise estimate uses.
    """
    keep_freed_memory()
    # Meaningless values of emulated ranks may be denormal numbers, on which CPUs are slow.
    torch.set_flush_denormal(True)
    try:
        own = take_turns(
            {**work, TWIN: work[base]}, rounds=rounds, warm_up=warm_up, device=ranks.device, cpu_time=cpu_time,
            meet=_meeting(ranks), on_round=on_round,
        )  # fmt: skip
    finally:
        torch.set_flush_denormal(False)
    slowest = _slowest(ranks.gather(own))
    return Race(
        slowest, noise_of(ratios(*([getattr(sample, part) for sample in slowest[name]] for name in (TWIN, base))))
    )


def _meeting(ranks: Ranks) -> Callable[[], None]:
    return (lambda: None) if ranks.emulated or ranks.size == 1 else dist.barrier


def _slowest(by_rank: list[dict[Hashable, list[Sample]]]) -> dict[Hashable, list[Sample]]:
    """The slowest rank's sample of each step: the others waited for it."""
    return {
        name: [
            max(at_once, key=lambda sample: sample.seconds) for at_once in zip(*(samples[name] for samples in by_rank))
        ]
        for name in by_rank[0]
    }


@dataclass(frozen=True)
class Held:
    """Bytes of one runner.  held_bytes: by the ledger; the others as in bench.peak.Memory.

    wide_mask_bytes: of held_bytes, what dropout masks of the activations' dtype take beyond 1 byte an
    element (``F.dropout`` on a CPU).  finite: False if the output holds an infinity or a NaN, on
    which kernels can run faster.
    """

    held_bytes: int
    wide_mask_bytes: int
    peak_bytes: int
    allocated_bytes: int | None
    requested_bytes: int | None
    finite: bool


def hold(runner: Runner) -> Held:
    """Count what a runner holds between forward and backward, and its peak.  Untimed."""
    for _ in range(2):  # workspaces, compiled kernels and cached weights are made once
        with record(runner.module) as ledger:
            output = runner.module(runner.leaf.clone())
        finite = bool(torch.isfinite(output).all())
        _backward(output)
        del output
        clear_gradients(runner.module, runner.leaf)
    memory = measure_memory(runner.module, runner.leaf)
    wide = sum(
        saved.bytes - saved.bytes // saved.dtype.itemsize
        for saved in ledger.saved
        if saved.op == "dropout" and not saved.argument
    )
    return Held(ledger.total_bytes, wide, memory.peak_bytes, memory.allocated_bytes, memory.requested_bytes, finite)


def progress_line(text: str, ranks: Ranks) -> None:
    """Overwrite the last line on rank 0's screen; does nothing if stderr is a file."""
    if ranks.rank == 0 and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
