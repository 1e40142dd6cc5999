"""Predicted step times of runs whose times were published, by the planner's own time model."""

from __future__ import annotations

from collections.abc import Mapping

from actmem.checks import ConfigError
from actmem.plan.planned_models import PlannedModel
from actmem.plan.search import find_plans
from actmem.plan.step_time import DEVICES, GIBIBYTE, Cluster

#: Enough for any plan: here only the time is asked for.
_NO_LIMIT = 2**20 * GIBIBYTE


def predicted_seconds(
    model: PlannedModel, gpus: int, device: str, global_batch_size: int, recompute: str, sizes: Mapping[str, int]
) -> float:
    """Seconds of one step of the layout with these sizes.  Raises ConfigError if there is none."""
    cluster = Cluster(gpus, _NO_LIMIT, device=DEVICES[device])
    found = find_plans(model.with_modes([recompute]), cluster, global_batch_size, 1, sizes, windows=False)
    if not found.plans:
        raise ConfigError("sizes", f"{model.name} has no plan on {gpus} GPUs with {dict(sizes)}")
    return found.plans[0].seconds.total
