"""Microbatch-level recomputation (2205.05198 appendix C): recompute only what does not fit.

Of the microbatches in flight on a rank, as many as fit keep everything; the rest keep what a
recomputation mode leaves.  When one that kept everything has had its backward, the next to
come takes its place, so the choice moves on like a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from actmem.config import ConfigError, ModelShape, Parallel, check_size
from actmem.formulas.model import stage_rows
from actmem.formulas.pipeline import in_flight, layer_bytes, layers_per_chunk
from actmem.formulas.states import state_rows
from actmem.rows import total


def activation_budget(
    shape: ModelShape,
    parallel: Parallel,
    device_bytes: int,
    pipeline_rank: int = 0,
    adam: str = "float32 gradients",
) -> int:
    """Bytes that parameters and optimizer state leave free on one rank; less than 0 if none.

    A real device has less: work space, communication buffers, fragments.
    """
    return device_bytes - total(state_rows(shape, parallel, pipeline_rank, adam))


def capacity(
    shape: ModelShape,
    parallel: Parallel,
    budget_bytes: int,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    recompute: str = "selective",
    element_size: int = 2,
) -> int:
    """How many chunk-microbatches of a rank can keep everything within ``budget_bytes``.

    The budget is for ``stage_rows``: layers and, on the first and last rank, the model's ends.
    From 0 to all that are in flight (with one chunk, min(p − r, n)).  Raises ConfigError if not
    even the recomputed form of all of them fits.
    """
    least = total(stage_rows(shape, parallel, pipeline_rank, recompute, num_microbatches, element_size))
    if least > budget_bytes:
        raise ConfigError(
            "budget_bytes", f"rank {pipeline_rank} needs {least:,} with recompute = {recompute!r}, got {budget_bytes:,}"
        )
    count = in_flight(parallel, pipeline_rank, num_microbatches)
    more = layer_bytes(shape, parallel, "none", element_size) - layer_bytes(shape, parallel, recompute, element_size)
    if more == 0:
        return count
    return min(count, (budget_bytes - least) // (more * layers_per_chunk(shape, parallel)))


def keeps_everything(microbatch: int, capacity: int, in_flight: int) -> bool:
    """Whether a microbatch keeps everything on 1F1B: the first ``capacity`` of every ``in_flight``.

    1F1B frees microbatches in the order in which they came, so places repeat with that period.
    """
    return microbatch % check_size("in_flight", in_flight) < capacity


def moving_window(actions: Iterable, capacity: int) -> list[tuple[int, int]]:
    """The (chunk, microbatch) pairs of one rank that keep everything, in the order of their forwards.

    actions: that rank's list from ``actmem.schedule``, of any order.  Each forward takes a place
    if fewer than ``capacity`` are taken; its backward gives it back.
    """
    kept: list[tuple[int, int]] = []
    places: set[tuple[int, int]] = set()
    for action in actions:
        which = action.chunk, action.microbatch
        if action.kind == "B":
            places.discard(which)
        elif len(places) < capacity:
            places.add(which)
            kept.append(which)
    return kept


def recomputed_share(capacity: int, in_flight: int, num_microbatches: int) -> Fraction:
    """Share of an iteration's microbatches that a 1F1B rank recomputes; 0 where all fit."""
    again = sum(not keeps_everything(i, capacity, in_flight) for i in range(num_microbatches))
    return Fraction(again, check_size("num_microbatches", num_microbatches))
