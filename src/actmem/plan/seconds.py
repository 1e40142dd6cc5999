"""How long one step takes by counts and stated rates, and which part is an assumption.

Counts: FLOPs of matrix products, bytes that operations move, bytes that ranks send, how often they
send, the schedule's bubble.  Assumptions: products reach ``Cluster.product_share`` of the peak rate;
every operation, a product too, moves its operands at memory bandwidth and overlaps nothing; links
run at their stated rate after ``LATENCY_SECONDS``; backward takes twice forward; what the text
below calls hidden costs only what doesn't fit behind the computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actmem.formulas.communication import Exchange
from actmem.plan.hardware import LATENCY_SECONDS, Cluster
from actmem.plan.layout import Layout
from actmem.plan.planned_model import CONTEXT_EXCHANGE, EXPERT_EXCHANGE, PlannedModel, RankWork

#: Bytes that Adam's step reads and writes for each element of a rank's share: gradient, copy and both moments
#: read, the last three written back, and the 16-bit weight.
_STEP_BYTES = 4 * 4 + 3 * 4 + 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by cause; they add up.

    compute: forward and backward of all microbatches on the slowest stage.  recompute: what runs again.  tensor:
    exchanges within layers that nothing hides.  pipeline: sends.  data: gradients and gathered weights beyond
    what overlaps.  bubble: waiting.  optimizer: Adam's step.
    """

    compute: float
    recompute: float
    tensor: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.recompute + self.tensor + self.pipeline + self.data + self.bubble + self.optimizer


def work_seconds(work: RankWork, cluster: Cluster) -> float:
    """Products at their share of the peak, and all operands at memory bandwidth."""
    device = cluster.device
    products = work.product_flops / (device.flops_per_second * cluster.product_share)
    return products + work.moved_bytes / device.memory_bytes_per_second


def exposed(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """The exchanges of a layer during which a tensor-parallel rank computes nothing.

    Forward's and recomputation's, and of backward's those outside the column-parallel products: an
    all-gather (ḡ), the experts' and those among context-parallel ranks.  The others run beside a product (2205.05198 section 4.2.2).
    """
    waiting = ("ḡ", CONTEXT_EXCHANGE, EXPERT_EXCHANGE)
    return [each for each in exchanges if each.phase != "backward" or each.where.startswith(waiting)]


def tensor_seconds(model: PlannedModel, layout: Layout, recompute: str, cluster: Cluster) -> float:
    """Exposed exchanges of one layer for one microbatch, forward and backward, among tensor and context ranks."""
    t, cp = layout.tensor_parallel_size, layout.context_parallel_size
    seconds = 0.0
    for exchange in exposed(model.layer_exchanges(layout, recompute)):
        rate = cluster.link(cp, t) if exchange.where.startswith(CONTEXT_EXCHANGE) else cluster.link(t, 1)
        seconds += exchange.wire_bytes / rate + LATENCY_SECONDS * exchange.count
    return seconds


def pipeline_seconds(model: PlannedModel, layout: Layout, cluster: Cluster) -> float:
    """Sends of one microbatch through one chunk: an output on, a gradient back."""
    if layout.pipeline_parallel_size == 1:
        return 0.0
    stride = layout.tensor_parallel_size * layout.context_parallel_size * layout.data_parallel_size
    return 2 * (model.output_bytes(layout) / cluster.link(2, stride) + LATENCY_SECONDS)


def data_seconds(elements: int, layout: Layout, num_microbatches: int, cluster: Cluster) -> float:
    """Reduce-scatter of float32 gradients and all-gather of 16-bit weights among data-parallel ranks, once a step.

    An all-reduce of gradients without ZeRO.  From stage 2 on gradients are reduced for every microbatch;
    stage 3 gathers weights for every forward and every backward pass too.
    """
    ranks = layout.data_parallel_size * layout.context_parallel_size
    rate = cluster.link(ranks, layout.tensor_parallel_size)
    reduced = 4 * (num_microbatches if layout.zero_stage >= 2 else 1)
    gathered = {0: 4, 1: 2, 2: 2, 3: 2 * 2 * num_microbatches}[layout.zero_stage]
    return (reduced + gathered) * elements * (ranks - 1) / ranks / rate


def optimizer_seconds(share: int, cluster: Cluster) -> float:
    """Adam's step on one rank's share of the parameters, at memory bandwidth."""
    return _STEP_BYTES * share / cluster.device.memory_bytes_per_second
