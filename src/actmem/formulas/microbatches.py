"""Recomputation of only what does not fit: microbatch-level recomputation (2205.05198 appendix C).

Of the microbatches in flight on a rank, as many as fit keep everything; the others keep what a recomputation mode
keeps.  After the backward of one that kept everything, the next microbatch takes its place, so the choice moves like a
window.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from actmem.config import ConfigError, ModelShape, Parallel, check_size, check_sizes
from actmem.formulas.activations import layer_bytes
from actmem.formulas.first_stage import in_flight, layers_per_chunk, stage_rows
from actmem.formulas.schedule import Action
from actmem.formulas.states import state_rows
from actmem.recipes import Recompute
from actmem.rows import total


def activation_budget(shape: ModelShape, parallel: Parallel, device_bytes: int, pipeline_rank: int = 0) -> int:
    """Bytes that parameters and optimizer state leave free on one rank; less than 0 if none.

    A real device has less: workspaces, communication buffers, fragmentation.
    """
    return device_bytes - total(state_rows(shape, parallel, pipeline_rank))


def capacity(
    shape: ModelShape,
    parallel: Parallel,
    budget_bytes: int,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    recompute: Recompute | str = "selective",
) -> int:
    """How many chunk-microbatches of a rank can keep everything within ``budget_bytes``.

    The budget is for ``stage_rows``: layers and, on the first and last rank, the model's ends.
    From 0 to the number in flight (with one chunk, min(p − r, n)).  Raises ConfigError if they
    don't fit even when all are recomputed.
    """
    recompute = Recompute.of(recompute)
    least = total(stage_rows(shape, parallel, pipeline_rank, recompute, num_microbatches))
    if least > budget_bytes:
        raise ConfigError(
            "budget_bytes",
            f"rank {pipeline_rank} needs {least:,} with recompute = {recompute.name!r}, got {budget_bytes:,}",
        )
    count = in_flight(parallel, pipeline_rank, num_microbatches)
    more = layer_bytes(shape, parallel) - layer_bytes(shape, parallel, recompute)
    if more == 0:
        return count
    return min(count, (budget_bytes - least) // (more * layers_per_chunk(shape, parallel)))


def moving_window(actions: Iterable[Action], capacity: int) -> list[tuple[int, int]]:
    """The (chunk, microbatch) pairs of one rank that keep everything, in the order of their forwards.

    actions: the rank's list from ``actmem.formulas.schedule``, in any order.  Each forward takes a place if
    fewer than ``capacity`` are taken; its backward frees it.
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
    """Share of an iteration's microbatches that a 1F1B rank recomputes; 0 if all fit."""
    check_sizes(in_flight=in_flight, num_microbatches=num_microbatches)
    check_size("capacity", capacity, least=0)
    rounds, rest = divmod(num_microbatches, in_flight)
    kept = rounds * min(capacity, in_flight) + min(capacity, rest)
    return Fraction(num_microbatches - kept, num_microbatches)
