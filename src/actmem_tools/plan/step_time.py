"""How long one step takes by counts and by the rates that data sheets state, and which part is an assumption.

Counts: FLOPs of matmuls, bytes that operations move, bytes that ranks send, how often they
send, the schedule's bubble.  Assumptions: matmuls reach ``MATMUL_SHARE`` of the peak rate;
every operation, a matmul too, moves its operands at memory bandwidth and overlaps nothing; links
run at ``LINK_SHARE`` of their rate after a ring's latency, one collective at a time; backward takes twice forward; what
the text below calls hidden costs only what doesn't fit behind one layer's computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from actmem.config import ConfigError, Parallel, check_size
from actmem.formulas.communication import OUTPUT
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND
from actmem.formulas.states import State
from actmem_more.llama_terms import CONTEXT_EXCHANGE, EXPERT_EXCHANGE
from actmem_tools.plan.planned_models import PlannedModel, RankWork

GIBIBYTE = 2**30


def gib_or_mib(size: int) -> str:
    """Bytes as text that is never "0.0 GiB": in MiB below a tenth of a GiB."""
    return f"{size / GIBIBYTE:.1f} GiB" if size >= 0.1 * GIBIBYTE else f"{size / 2**20:.2f} MiB"


@dataclass(frozen=True)
class Device:
    """One GPU: dense 16-bit FLOPs a second, memory bandwidth, and what it sends a second in one direction
    to a neighbour in its node and to one in another node (bytes).

    hides_both: whether collectives of tensor and of sharded data parallelism run beside matmuls together.  Before
    Blackwell the first need CUDA_DEVICE_MAX_CONNECTIONS=1, which the second refuse (Megatron-LM's arguments.py)."""

    name: str
    flops_per_second: int
    memory_bytes_per_second: int
    node_bytes_per_second: int
    network_bytes_per_second: int
    hides_both: bool = False


#: Data sheets, dense rates with float32 sums; of a printed bandwidth of NVLink or PCIe half goes each way.  Network: a
#: port for each GPU of 200 Gb/s with A100 (2205.05198 section 6) and 400 Gb/s with H100, H200, B200 (DGX) and MI300X.
#: Nodes of eight T4 or L4 share 100 Gb/s (AWS g4dn.metal, g6.48xlarge); nobody states it for
#: RTX 4090: the same here.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND, 300 * 10**9, 25 * 10**9),
        Device("h100", 989 * 10**12, 3_350 * 10**9, 450 * 10**9, 50 * 10**9),
        Device("h200", 989 * 10**12, 4_800 * 10**9, 450 * 10**9, 50 * 10**9),
        Device("b200", 2_250 * 10**12, 8_000 * 10**9, 900 * 10**9, 50 * 10**9, hides_both=True),
        # Seven links of Infinity Fabric, one to each other GPU of the node.
        Device("mi300x", 1_307 * 10**12, 5_300 * 10**9, 7 * 64 * 10**9, 50 * 10**9),
        # PCIe 3.0, and 4.0 for the next two.
        Device("t4", 65 * 10**12, 300 * 10**9, 16 * 10**9, 100 * 10**9 // 64),
        Device("l4", 121 * 10**12, 300 * 10**9, 32 * 10**9, 100 * 10**9 // 64),
        Device("rtx4090", 165 * 10**12, 1_008 * 10**9, 32 * 10**9, 100 * 10**9 // 64),
    )
}

#: Share of the peak rate that large matmuls reach: an assumption, the same for every plan and device.
MATMUL_SHARE = 0.75

#: Share of a link's rate that carries data: "protocol overhead (~20%)", NCCL's author in NVIDIA/nccl-tests issue 212.
LINK_SHARE = 0.8

#: Plans whose times are nearer than this can't be told apart: of the paper's eight own times seven are that near.
MODEL_ERROR = 0.1

#: A ring's latency: once, for each step inside a node, and for each between nodes (NCCL's own model of large messages,
#: src/graph/tuning.cc: ring, Simple).
RING_SECONDS, NODE_STEP_SECONDS, NETWORK_STEP_SECONDS = 8.4e-6, 3.4e-6, 14e-6

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

    def __post_init__(self) -> None:
        check_size("gpus", self.gpus, largest=2**20)
        check_size("per_node", self.per_node, largest=2**10)
        check_size("memory_bytes", self.memory_bytes, inf)
        check_size("allowance_bytes", self.allowance_bytes, inf, least=0)
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ConfigError("gpus", f"{self.gpus} must be divisible by per_node = {self.per_node}")
        if self.memory_bytes <= self.allowance_bytes:
            sizes = f"{self.memory_bytes / GIBIBYTE:g} GiB with {self.allowance_bytes / GIBIBYTE:g} GiB left free"
            raise ConfigError("memory", f"{sizes} leaves nothing for the model")

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU without the allowance."""
        return self.memory_bytes - self.allowance_bytes

    def inside_node(self, ranks: int, stride: int) -> bool:
        """Whether a group of ``ranks`` whose members are ``stride`` GPUs apart has only a node's own links."""
        return ranks * stride <= self.per_node

    def link(self, ranks: int, stride: int) -> float:
        """Bytes a second of each member of such a group.

        Between nodes it has the ports of all its members in a node.
        """
        node, port = self.device.node_bytes_per_second, self.device.network_bytes_per_second
        inside = self.inside_node(ranks, stride)
        return LINK_SHARE * (node if inside else min(node, max(1, self.per_node // stride) * port))

    def ring_seconds(self, ranks: int, stride: int) -> float:
        """Seconds a byte that such a group gathers or reduces, without latency."""
        return (ranks - 1) / ranks / self.link(ranks, stride)

    def latency(self, ranks: int, stride: int) -> float:
        """Seconds that a ring of such a group takes beside its bytes."""
        nodes = -(-ranks // max(1, min(ranks, self.per_node // stride)))
        return RING_SECONDS + (ranks - nodes) * NODE_STEP_SECONDS + (nodes - 1) * NETWORK_STEP_SECONDS


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by cause; they add up.

    compute: forward and backward of all microbatches on the slowest stage.
    recompute: recomputation there.
    tensor: collectives within layers that nothing hides.
    pipeline: sends.
    data: gradients and gathered weights that computing waits for.
    bubble: waiting.
    optimizer: its step.
    hidden: collectives beside computing, not in the sum.
    """

    compute: float
    recompute: float
    tensor: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """All of them but the hidden ones."""
        return self.compute + self.recompute + self.tensor + self.pipeline + self.data + self.bubble + self.optimizer


def work_seconds(work: RankWork, cluster: Cluster) -> float:
    """Matmuls at their share of the peak, and all operands at memory bandwidth."""
    device = cluster.device
    matmuls = work.matmul_flops / (device.flops_per_second * MATMUL_SHARE)
    return matmuls + work.moved_bytes / device.memory_bytes_per_second


@dataclass
class Traffic:
    """Seconds of one layer's collectives for one microbatch on one kind of link: those that forward and that backward
    wait for, and those beside backward's matmuls."""

    forward: float = 0.0
    backward: float = 0.0
    beside: float = 0.0


#: Places of backward's collectives that no matmul hides: what ḡ gathers, the experts' and the context's.  The others
#: run beside the column-parallel matmuls (2205.05198 section 4.2.2).
_WAITED_FOR = (OUTPUT, CONTEXT_EXCHANGE, EXPERT_EXCHANGE)


def layer_traffic(model: PlannedModel, layout: Parallel, recompute: str, cluster: Cluster) -> dict[bool, Traffic]:
    """Collectives of one layer among tensor and context ranks, by whether they stay inside a node."""
    t, cp = layout.tensor_parallel_size, layout.context_parallel_size
    traffic = {True: Traffic(), False: Traffic()}
    for collective in model.layer_collectives(layout, recompute):
        in_pairs = collective.place == CONTEXT_EXCHANGE  # V follows K at once, so both have one latency
        of_experts = collective.place == EXPERT_EXCHANGE
        group = (cp, t) if in_pairs else (layout.expert_ranks, 1) if of_experts else (t, 1)
        rings = collective.count // 2 if in_pairs else collective.count * (2 if collective.kind == "all-reduce" else 1)
        seconds = collective.wire_bytes / cluster.link(*group) + cluster.latency(*group) * rings
        place = traffic[cluster.inside_node(*group)]
        if collective.phase == "forward":
            place.forward += seconds
        elif collective.phase == "recompute" or collective.place in _WAITED_FOR:
            place.backward += seconds
        else:
            place.beside += seconds
    return traffic


def pipeline_seconds(model: PlannedModel, layout: Parallel, cluster: Cluster) -> float:
    """Sends of one microbatch through one chunk: an output on, a gradient back."""
    if layout.pipeline_parallel_size == 1:
        return 0.0
    stride = layout.tensor_parallel_size * layout.replicas
    return 2 * (model.output_bytes(layout) / cluster.link(2, stride) + cluster.latency(2, stride))


@dataclass(frozen=True)
class Shards:
    """What data-parallel ranks send each other.

    of_layer: elements of a layer.
    of_ends: elements of what the rank has beside its layers.
    layers: of a rank.
    weight_size, gradient_size: bytes of an element.
    """

    of_layer: float
    of_ends: int
    layers: int
    weight_size: int = 2
    gradient_size: int = 4


def data_seconds(
    shards: Shards, layout: Parallel, num_microbatches: int, room: tuple[float, float], cluster: Cluster
) -> tuple[float, float]:
    """Collectives among data-parallel ranks in one step.

    Returns: seconds that computing waits for them, and those that it hides.

    room: seconds of one layer's forward and of its backward in which the link is free for them.

    ZeRO-0 reduces and gathers gradients, ZeRO-1 reduces them and gathers weights, each once a step; from stage 2 on
    gradients are reduced in every backward pass, in stage 3 weights are gathered in every pass.  Layers pass one after
    another: forward waits for the first weights, backward for the last gradients, and each layer between for what takes
    longer than its computing.  In stages 2 and 3 every pass through a chunk does, as FSDP2 waits at its ends.
    """
    ranks = layout.replicas
    if ranks == 1:
        return 0.0, 0.0
    stage, n, m = layout.zero_stage, num_microbatches, layout.num_model_chunks
    group = ranks, layout.tensor_parallel_size
    per_byte, latency = cluster.ring_seconds(*group), cluster.latency(*group)
    rings = 1 if stage else 2
    gather, gather_ends = (shards.weight_size * e * per_byte + latency for e in (shards.of_layer, shards.of_ends))
    reduce, reduce_ends = (
        rings * (shards.gradient_size * e * per_byte + latency) for e in (shards.of_layer, shards.of_ends)
    )
    forward_room, backward_room = room
    # A run of layers in which nothing waits for a pass to end.
    forwards, forward_runs = {0: (0, 0), 1: (1, 1), 2: (1, 1), 3: (n, n * m)}[stage]
    backwards, backward_runs = (n, n * m) if stage >= 2 else (1, 1)
    again = gather if stage == 3 else 0.0
    first_again = again if layout.pipeline_parallel_size > 1 else 0.0  # else the last layer's weights are still there

    waiting = forwards * gather_ends + backwards * reduce_ends
    waiting += forward_runs * gather + (forwards * shards.layers - forward_runs) * max(0.0, gather - forward_room)
    between = backwards * shards.layers - backward_runs
    waiting += backward_runs * (first_again + reduce) + between * max(0.0, again + reduce - backward_room)
    everything = forwards * (shards.layers * gather + gather_ends) + backwards * (shards.layers * reduce + reduce_ends)
    everything += between * again + backward_runs * first_again
    return waiting, everything - waiting


def optimizer_seconds(share: int, states: Iterable[State], cluster: Cluster) -> float:
    """The optimizer's step on one rank's share of the parameters, at memory bandwidth.

    The gradient is read, states are read and written, the 16-bit weight is written.
    """
    weights, gradients, *own = (state.bytes_of(share) for state in states)
    return (weights + gradients + 2 * sum(own)) / cluster.device.memory_bytes_per_second
