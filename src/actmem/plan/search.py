"""The search: every layout of a job is counted; what fits is ranked by predicted time, what doesn't says by how much.

The bytes are those of ``rank_bill``.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from functools import cache

from actmem.checks import ConfigError, check_size
from actmem.formulas.batch import recomputed_share
from actmem.plan.every_layout import layouts
from actmem.plan.hardware import Cluster
from actmem.plan.layout import Layout
from actmem.plan.outcome import Found, Plan, Refused
from actmem.plan.planned_model import PlannedModel
from actmem.plan.rank_bill import (
    Bill,
    flights,
    held_bytes,
    kept_by_layer,
    rank_bill,
    rank_parameters,
    share,
    stage_layers,
    static_lines,
)
from actmem.plan.seconds import (
    StepSeconds,
    data_seconds,
    optimizer_seconds,
    pipeline_seconds,
    tensor_seconds,
    work_seconds,
)


def find_plans(
    model: PlannedModel,
    cluster: Cluster,
    global_batch_size: int,
    keep: int = 10,
    fixed: Mapping[str, int] = {},
    windows: bool = True,
) -> Found:
    """Search all layouts.  keep: how many plans, and refused layouts, to return.  fixed: see ``layouts``.

    windows: whether microbatches may keep everything where there is room (appendix C).

    Deterministic.  Raises ConfigError if no layout has the given GPUs and batch, or on an axis that the model lacks.
    """
    check_size("global_batch_size", global_batch_size)
    for name, size in fixed.items():
        if size > 1 and (reason := model.missing_axis(name)):
            raise ConfigError(name, reason)
    return _Search(model, cluster, global_batch_size, windows).run(keep, fixed)


class _Search:
    def __init__(self, model: PlannedModel, cluster: Cluster, global_batch_size: int, windows: bool):
        self.model, self.cluster, self.batch, self.windows = model, cluster, global_batch_size, windows
        self.counted = 0
        self.unfit: dict[str, int] = {}
        self._refusal = cache(model.refusal)
        self._times = cache(self._layer_seconds)

    def run(self, keep: int, fixed: Mapping[str, int]) -> Found:
        plans: list[Plan] = []
        nearest: list[Refused] = []
        for layout in layouts(self.model, self.cluster, self.batch, fixed):
            reason = self._refusal(layout.layer_axes) or self._cannot_spread(layout)
            if reason:
                self.unfit[reason] = self.unfit.get(reason, 0) + 1
                continue
            outcome = self._best(layout)
            (plans if isinstance(outcome, Plan) else nearest).append(outcome)  # type: ignore[arg-type]
        if not self.counted:
            reasons = max(self.unfit, key=lambda reason: self.unfit[reason]) if self.unfit else ""
            wanted = "".join(f", {name} = {size}" for name, size in fixed.items())
            rule = f"no layout of {self.cluster.gpus} has a global batch of {self.batch}{wanted}"
            raise ConfigError("gpus", f"{rule}: {reasons}" if reasons else rule)
        best = heapq.nsmallest(keep, plans, key=lambda plan: plan.order)
        close = heapq.nsmallest(keep, nearest, key=lambda refused: (refused.bytes, repr(refused.layout)))
        return Found(best, close, self.counted, len(plans), self.unfit)

    def _cannot_spread(self, layout: Layout) -> str:
        """Why pipeline ranks can't share the layers; empty if they can."""
        try:
            self._spread(layout)
        except ConfigError as error:
            return str(error)
        return ""

    def _spread(self, layout: Layout) -> tuple[int, ...]:
        return stage_layers(self.model.num_layers, layout.pipeline_parallel_size, layout.num_model_chunks)

    def _layer_seconds(self, layout: Layout, recompute: str) -> tuple[float, float, float, float]:
        """One layer: forward, recomputation, exposed exchanges; and the output layer's forward."""
        return (
            work_seconds(self.model.layer_work(layout), self.cluster),
            work_seconds(self.model.added_work(layout, recompute), self.cluster),
            tensor_seconds(self.model, layout, recompute, self.cluster),
            work_seconds(self.model.last_work(layout), self.cluster),
        )

    def _best(self, layout: Layout) -> Plan | Refused:
        """With the least recomputation that fits; refused if none does."""
        self.counted += 1
        n = self.batch // (layout.data_parallel_size * layout.micro_batch_size)
        p = layout.pipeline_parallel_size
        # Ranks between hold as much as rank 1 or less; rank 1 may have a layer more than the ends.
        ranks = sorted({0, min(1, p - 1), p - 1})
        static = {rank: sum(size for *_, size, _ in static_lines(self.model, layout, rank)) for rank in ranks}
        room = self.cluster.usable_bytes
        sizes: dict[int, int] = {}
        # Where not even the states fit, only the smallest sizes are of interest.
        hopeless = max(static.values()) > room
        for recompute in self.model.recompute_modes[-1:] if hopeless else self.model.recompute_modes:
            sizes = {rank: static[rank] + held_bytes(self.model, layout, recompute, n, rank) for rank in ranks}
            if max(sizes.values()) <= room:
                break
        else:
            fullest = max(sizes, key=lambda rank: (sizes[rank], -rank))
            return Refused(layout, self.model.recompute_modes[-1], n, fullest, sizes[fullest])
        whole, recomputed = self._whole(layout, recompute, n, sizes)
        fullest = max(sizes, key=lambda rank: (sizes[rank], -rank))
        seconds = self._seconds(layout, recompute, n, recomputed)
        return Plan(layout, recompute, whole, recomputed, n, fullest, sizes[fullest], seconds)

    def _whole(self, layout: Layout, recompute: str, n: int, sizes: dict[int, int]) -> tuple[int, float]:
        """Microbatches that keep everything in the room that is left (appendix C), on rank 0, which decides the pace."""
        more = kept_by_layer(self.model, layout, "none") - kept_by_layer(self.model, layout, recompute)
        if not self.windows or recompute == "none" or layout.num_model_chunks > 1 or more <= 0:
            return 0, float(recompute != "none")
        flight, layers, _ = flights(self.model.num_layers, layout.pipeline_parallel_size, 1, n, 0)
        whole = min(flight, (self.cluster.usable_bytes - sizes[0]) // (more * layers))
        sizes[0] += whole * more * layers
        return whole, float(recomputed_share(whole, flight, n))

    def _seconds(self, layout: Layout, recompute: str, n: int, recomputed: float) -> StepSeconds:
        forward, again, exchanges, head = self._times(layout.layer_axes, recompute)
        p, m = layout.pipeline_parallel_size, layout.num_model_chunks
        per_rank = self._spread(layout)
        # The slowest stage sets the pace: the one with most layers, or the last with its output layer.
        most = max(per_rank)
        loads = [(most, 0.0), (per_rank[-1], head)] if p > 1 else [(most, head)]
        layers, ends = max(loads, key=lambda load: load[0] * 3 * forward + 3 * load[1])
        compute = n * 3 * (layers * forward + ends)
        extra = n * layers * again * recomputed
        tensor = n * layers * exchanges
        pipeline = n * m * pipeline_seconds(self.model, layout, self.cluster)
        busy = compute + extra + tensor
        bubble = (p - 1) / (n * m) * busy
        elements = rank_parameters(self.model, layout, 0)[0]
        data = data_seconds(elements, layout, n, self.cluster)
        # Hidden behind the last microbatch's backward, or behind everything where it runs all the time.
        behind = busy if layout.zero_stage >= 2 else 2 * layers * forward
        step = optimizer_seconds(share(elements, layout, layout.zero_stage >= 1), self.cluster)
        return StepSeconds(compute, extra, tensor, pipeline, max(0.0, data - behind), bubble, step)


def bill_of(model: PlannedModel, plan: Plan, device_type: str = "cuda") -> Bill:
    """The plan's bill on its fullest rank, line by line."""
    whole = plan.whole_microbatches if plan.pipeline_rank == 0 else 0
    return rank_bill(
        model, plan.layout, plan.recompute, plan.num_microbatches, plan.pipeline_rank, whole, device_type=device_type
    )
