"""How long one step takes by counts and by the rates that data sheets state, and which part is an assumption.

Counts: FLOPs of matrix products, bytes that operations move, bytes that ranks send, how often they
send, the schedule's bubble.  Assumptions: products reach ``Cluster.product_share`` of the peak rate;
every operation, a product too, moves its operands at memory bandwidth and overlaps nothing; links
run at their stated rate after ``LATENCY_SECONDS``; backward takes twice forward; what the text
below calls hidden costs only what doesn't fit behind the computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actmem.config import ConfigError, check_size, shown
from actmem.formulas.communication import Exchange
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND
from actmem.plan.layout import Layout
from actmem.plan.planned_models import CONTEXT_EXCHANGE, EXPERT_EXCHANGE, PlannedModel, RankWork

GIBIBYTE = 2**30


def gib_or_mib(size: int) -> str:
    """Bytes as text that is never "0.0 GiB": in MiB below a tenth of a GiB."""
    return f"{size / GIBIBYTE:.1f} GiB" if size >= 0.1 * GIBIBYTE else f"{size / 2**20:.2f} MiB"


@dataclass(frozen=True)
class Device:
    """One GPU: dense 16-bit FLOPs a second, memory bandwidth, and what it sends a second in one direction
    to a neighbour in its node and to one in another node (bytes)."""

    name: str
    flops_per_second: int
    memory_bytes_per_second: int
    node_bytes_per_second: int
    network_bytes_per_second: int


#: NVIDIA's data sheets (SXM); half of NVLink's printed rate goes each way.  Network: one 200 Gb/s port a GPU with
#: A100 (2205.05198 section 6), one of 400 Gb/s with H100 and H200.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND, 300 * 10**9, 25 * 10**9),
        Device("h100", 989 * 10**12, 3_350 * 10**9, 450 * 10**9, 50 * 10**9),
        Device("h200", 989 * 10**12, 4_800 * 10**9, 450 * 10**9, 50 * 10**9),
    )
}

#: Share of the peak rate that large matrix products reach: an assumption, the same for every plan and device.
PRODUCT_SHARE = 0.75

#: What an exchange takes before its first byte arrives: an assumption, of the order that NCCL shows within a node.
LATENCY_SECONDS = 20e-6

#: What stays free on each GPU: CUDA's context, NCCL, and what the allocator reserves beyond what is allocated.  In 36
#: public nanotron runs the last of these is 0.15 to 2.8 GiB.
ALLOWANCE_BYTES = 4 * GIBIBYTE


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a job.  memory_bytes: of one GPU.  per_node: GPUs that share a node's fast links."""

    gpus: int
    memory_bytes: int
    per_node: int = 8
    device: Device = DEVICES["h100"]
    allowance_bytes: int = ALLOWANCE_BYTES
    product_share: float = PRODUCT_SHARE

    def __post_init__(self) -> None:
        check_size("gpus", self.gpus, largest=2**20)
        check_size("per_node", self.per_node, largest=2**10)
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ConfigError("gpus", f"{self.gpus} must be divisible by per_node = {self.per_node}")
        if not 0 < self.product_share <= 1:
            raise ConfigError("product_share", f"must be above 0 and at most 1, got {shown(self.product_share)}")
        if self.memory_bytes <= self.allowance_bytes:
            sizes = f"{self.memory_bytes / GIBIBYTE:g} GiB with {self.allowance_bytes / GIBIBYTE:g} GiB left free"
            raise ConfigError("memory", f"{sizes} leaves nothing for the model")

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU without the allowance."""
        return self.memory_bytes - self.allowance_bytes

    def link(self, ranks: int, stride: int) -> int:
        """Bytes a second of a group of ``ranks`` whose members are ``stride`` GPUs apart."""
        inside = ranks * stride <= self.per_node
        return self.device.node_bytes_per_second if inside else self.device.network_bytes_per_second


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
