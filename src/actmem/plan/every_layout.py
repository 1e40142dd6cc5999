"""Every layout of a job, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from actmem.plan.hardware import Cluster
from actmem.plan.layout import ZERO_STAGES, Layout
from actmem.plan.planned_model import PlannedModel

#: Microbatches of more sequences than this only hold more.
LARGEST_MICRO_BATCH = 32
#: Context-parallel ranks share one sequence, and hold at least so many tokens of it.
LEAST_CONTEXT_TOKENS = 2048


def divisors(number: int, largest: int) -> list[int]:
    """Divisors up to ``largest``, in order."""
    return [each for each in range(1, min(number, largest) + 1) if number % each == 0]


def layouts(
    model: PlannedModel, cluster: Cluster, global_batch_size: int, fixed: Mapping[str, int] = {}
) -> Iterator[Layout]:
    """Every layout of the cluster's GPUs, in a fixed order; sizes that the model can't have are still among them.

    fixed: sizes by their names in Layout; only layouts that have them.
    """
    for layout in _all_layouts(model, cluster, global_batch_size):
        if all(getattr(layout, name) == size for name, size in fixed.items()):
            yield layout


def _all_layouts(model: PlannedModel, cluster: Cluster, global_batch_size: int) -> Iterator[Layout]:
    contexts = [1]
    while model.context_parallel and model.seq_length >= 2 * contexts[-1] * LEAST_CONTEXT_TOKENS:
        contexts.append(2 * contexts[-1])
    for t, cp in product(divisors(cluster.per_node, cluster.per_node), contexts):
        if cluster.gpus % (t * cp):
            continue
        for p in divisors(cluster.gpus // (t * cp), model.num_layers):
            dp = cluster.gpus // (t * cp * p)
            if global_batch_size % dp:
                continue
            sequential = (False, True) if t > 1 else (False,)
            stages = ZERO_STAGES if dp * cp > 1 else (0,)
            chunks = divisors(-(-model.num_layers // p), model.num_layers) if p > 1 else [1]
            for m, sp, b in product(chunks, sequential, divisors(global_batch_size // dp, LARGEST_MICRO_BATCH)):
                if m > 1 and (global_batch_size // dp // b) % p:
                    continue
                for zero in stages:
                    yield Layout(dp, t, p, b, m, cp, sp, zero)
