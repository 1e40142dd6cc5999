"""Predict how long one step takes, from counts, from the rates in GPUs' data sheets, and from assumptions.

The counts are the FLOPs of matmuls, the bytes that operations move, the bytes that ranks send, how often they send, and
the schedule's bubble.  The assumptions are:

- matmuls reach ``MATMUL_SHARE`` of the peak rate;
- every operation reads and writes memory at full bandwidth; a matmul takes this time in addition to that of its FLOPs;
- links run at ``LINK_SHARE`` of their rate after a ring's latency, one collective at a time;
- backward takes twice as long as forward;
- a collective that can overlap with a layer's computation costs only the time by which it takes longer.
"""

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


@dataclass(frozen=True)
class Device:
    """The rates of one kind of GPU, from its data sheet.

    Attributes:
        name: the GPU's name for ``plan --device``, such as "h100".
        flops_per_second: rate of dense matmuls in 16 bits.
        memory_bytes_per_second: bandwidth of the GPU's memory.
        node_bytes_per_second: bytes that a GPU sends per second, in one direction, to the GPUs of its node.
        network_bytes_per_second: bytes that a GPU sends per second, in one direction, to other nodes.
        hides_both: whether collectives of tensor parallelism and of sharded data parallelism can both run beside
            matmuls.  Before Blackwell they can't: collectives of tensor parallelism run beside matmuls only with
            CUDA_DEVICE_MAX_CONNECTIONS=1, which sharded data parallelism refuses (Megatron-LM's arguments.py).
    """

    name: str
    flops_per_second: int
    memory_bytes_per_second: int
    node_bytes_per_second: int
    network_bytes_per_second: int
    hides_both: bool = False


#: Rates from data sheets: dense matmuls that add up in float32; half of the printed bandwidth of NVLink or PCIe, which
#: counts both directions.  Network: each GPU has a port, of 200 Gb/s with A100 (2205.05198 section 6) and of 400 Gb/s
#: with H100, H200, B200 (DGX) and MI300X.  Eight T4 or L4 of a node share 100 Gb/s (AWS g4dn.metal, g6.48xlarge); for
#: RTX 4090 nobody states a number, so it has the same here.
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

#: Relative error of predicted times: plans whose times differ by less can't be told apart.  Of the paper's eight
#: measured times the prediction of seven is within it.
MODEL_ERROR = 0.1

#: Latency of a ring in seconds: its start, then each step inside a node, and each step between nodes (NCCL's own model
#: of large messages, src/graph/tuning.cc: ring, Simple).
RING_SECONDS, NODE_STEP_SECONDS, NETWORK_STEP_SECONDS = 8.4e-6, 3.4e-6, 14e-6

#: Memory of each GPU that a plan leaves free: for CUDA's context, NCCL, and what the allocator reserves beyond what is
#: allocated.  In 36 public nanotron runs the allocator's part is 0.15 to 2.8 GiB.
ALLOWANCE_BYTES = 4 * GIBIBYTE


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a job.

    Its methods take a group of ranks as two numbers: ``ranks``, the size of the group, and ``stride``, the distance in
    GPUs from one member to the next (ranks 0, 8, 16 have stride 8).

    Attributes:
        gpus: how many GPUs the job has.
        memory_bytes: memory of one GPU.
        per_node: how many GPUs a node has; fast links such as NVLink connect them.
        device: the kind of GPU, with its rates, such as ``DEVICES["h100"]``.
        allowance_bytes: memory of each GPU that is left free for CUDA, NCCL and the allocator's reserve.

    Raises: ConfigError on a number below 1 or too large, if ``per_node`` does not divide ``gpus``, or if the allowance
        leaves no memory.
    """

    gpus: int
    memory_bytes: int
    per_node: int = 8
    device: Device = DEVICES["h100"]
    allowance_bytes: int = ALLOWANCE_BYTES

    def __post_init__(self) -> None:
        check_size("gpus", self.gpus, largest=2**20)
        check_size("per_node", self.per_node, largest=2**10)
        check_size("memory", self.memory_bytes, inf)
        check_size("allowance_bytes", self.allowance_bytes, inf, least=0)
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ConfigError("gpus", f"{self.gpus} must be divisible by per_node = {self.per_node}")
        if self.memory_bytes <= self.allowance_bytes:
            sizes = f"{self.memory_bytes / GIBIBYTE:g} GiB with {self.allowance_bytes / GIBIBYTE:g} GiB left free"
            raise ConfigError("memory", f"{sizes} leaves nothing for the model")

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that a plan may fill: all but ``allowance_bytes``."""
        return self.memory_bytes - self.allowance_bytes

    def inside_node(self, ranks: int, stride: int) -> bool:
        """Return whether a group of ``ranks`` ranks, ``stride`` GPUs apart, is inside one node."""
        return ranks * stride <= self.per_node

    def link(self, ranks: int, stride: int) -> float:
        """Return how many bytes per second each rank of a group sends in a ring collective.

        If the group spans nodes, the ring uses the network ports of all its members in a node at once.

        Args:
            ranks: how many ranks the group has.
            stride: the distance from one rank of the group to the next, in GPUs.
        """
        node, port = self.device.node_bytes_per_second, self.device.network_bytes_per_second
        inside = self.inside_node(ranks, stride)
        return LINK_SHARE * (node if inside else min(node, max(1, self.per_node // stride) * port))

    def ring_seconds(self, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter per byte of the unsharded tensor, without latency.

        Args:
            ranks: how many ranks the group has.
            stride: the distance from one rank of the group to the next, in GPUs.
        """
        return (ranks - 1) / ranks / self.link(ranks, stride)

    def latency(self, ranks: int, stride: int) -> float:
        """Return the latency of one pass around a group's ring in seconds: the time that even an empty tensor takes.

        Args:
            ranks: how many ranks the group has.
            stride: the distance from one rank of the group to the next, in GPUs.
        """
        nodes = -(-ranks // max(1, min(ranks, self.per_node // stride)))
        return RING_SECONDS + (ranks - nodes) * NODE_STEP_SECONDS + (nodes - 1) * NETWORK_STEP_SECONDS


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step by what they are spent on; all but ``hidden`` add up to ``total``.

    Attributes:
        compute: forward and backward of all microbatches on the slowest pipeline rank.
        recompute: recomputation on that rank.
        tensor: waiting for collectives inside layers (tensor, context and expert parallelism).
        pipeline: sends from one stage to the next.
        data: waiting for collectives of gradients and weights among data-parallel ranks.
        bubble: idle time of a rank in the pipeline's fill and drain.
        optimizer: the optimizer's step.
        hidden: collectives that overlap with computation, and so are assumed to add nothing to ``total``.
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
        """Seconds of the whole step: the sum of all fields but ``hidden``."""
        return self.compute + self.recompute + self.tensor + self.pipeline + self.data + self.bubble + self.optimizer


def work_seconds(work: RankWork, cluster: Cluster) -> float:
    """Predict the seconds of operations: FLOPs at ``MATMUL_SHARE`` of the peak rate, plus bytes at memory bandwidth.

    Args:
        work: FLOPs and moved bytes of the operations on one rank.
        cluster: the GPUs, whose rates are read.
    """
    device = cluster.device
    matmuls = work.matmul_flops / (device.flops_per_second * MATMUL_SHARE)
    return matmuls + work.moved_bytes / device.memory_bytes_per_second


@dataclass
class Traffic:
    """Seconds of one layer's collectives for one microbatch on one kind of link, inside or between nodes.

    Attributes:
        forward: collectives that the forward pass waits for.
        backward: collectives that the backward pass, or recomputation in it, waits for.
        beside: collectives that overlap with matmuls of the backward pass.
    """

    forward: float = 0.0
    backward: float = 0.0
    beside: float = 0.0


#: Places of collectives that backward waits for: ḡ's all-gather, and those for experts and of context parallelism.  All
#: others in backward run beside matmuls of column-parallel weights' gradients (2205.05198 section 4.2.2).
_WAITED_FOR = (OUTPUT, CONTEXT_EXCHANGE, EXPERT_EXCHANGE)


def layer_traffic(model: PlannedModel, layout: Parallel, recompute: str, cluster: Cluster) -> dict[bool, Traffic]:
    """Predict the seconds of one layer's collectives for one microbatch.

    Args:
        model: the planned model.
        layout: how the GPUs share the model.
        recompute: the mode of recomputation, such as "full".
        cluster: the GPUs and their links.

    Returns: two entries: under True for groups of ranks inside one node, under False for groups that span nodes.
    """
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
    """Predict the seconds that one model chunk's sends take for one microbatch.

    A chunk sends its output to the next stage, and the gradient of its input to the stage before.

    Args:
        model: the planned model.
        layout: how the GPUs share the model.
        cluster: the GPUs and their links.

    Returns: seconds; 0 without a pipeline.
    """
    if layout.pipeline_parallel_size == 1:
        return 0.0
    stride = layout.tensor_parallel_size * layout.replicas
    return 2 * (model.output_bytes(layout) / cluster.link(2, stride) + cluster.latency(2, stride))


@dataclass(frozen=True)
class Shards:
    """Sizes of the weights that data-parallel collectives gather, and of the gradients that they reduce, on one rank.

    Attributes:
        of_layer: elements of one layer's weights.
        of_ends: elements of the rank's weights outside the layers (embedding, final norm, output layer).
        layers: how many layers the rank has.
        weight_size: bytes of a weight's element as it is sent.
        gradient_size: bytes of a gradient's element as it is sent.
    """

    of_layer: float
    of_ends: int
    layers: int
    weight_size: int = 2
    gradient_size: int = 4


def data_seconds(
    shards: Shards, layout: Parallel, num_microbatches: int, room: tuple[float, float], cluster: Cluster
) -> tuple[float, float]:
    """Predict the seconds of collectives among data-parallel ranks in one step.

    Without ZeRO gradients are all-reduced once a step.  ZeRO-1 reduce-scatters gradients and all-gathers weights once a
    step.  ZeRO-2 reduce-scatters gradients in every backward pass.  ZeRO-3 also all-gathers weights in every forward
    and backward pass.

    The collectives of one layer overlap with the computation of its neighbour.  Three waits are left: forward waits for
    the first layer's weights; backward waits for the gradients of the layer that it runs last; and a layer in between
    waits if its collectives take longer than ``room``.  ZeRO-2 and ZeRO-3 have these waits in every pass through a
    model chunk, because FSDP2 synchronizes at the end of each pass.

    Args:
        shards: sizes of the rank's weights and gradients.
        layout: how the GPUs share the model; it has the ZeRO stage and the number of ranks with the same weights.
        num_microbatches: microbatches in the step on one data-parallel rank.
        room: two numbers of seconds: how long during one layer's forward, and during its backward, the link is free for
            these collectives.
        cluster: the GPUs and their links.

    Returns: two numbers of seconds: those that computation waits for these collectives, and those of collectives that
        overlap with computation.
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
    # How many passes have collectives, and into how many runs of layers, each with a wait at its end, they fall.
    forwards, forward_runs = {0: (0, 0), 1: (1, 1), 2: (1, 1), 3: (n, n * m)}[stage]
    backwards, backward_runs = (n, n * m) if stage >= 2 else (1, 1)
    regather = gather if stage == 3 else 0.0
    # Without a pipeline backward begins where forward has just ended: the last layer's weights are still there.
    first_regather = regather if layout.pipeline_parallel_size > 1 else 0.0

    waiting = forwards * gather_ends + backwards * reduce_ends
    waiting += forward_runs * gather + (forwards * shards.layers - forward_runs) * max(0.0, gather - forward_room)
    between = backwards * shards.layers - backward_runs
    waiting += backward_runs * (first_regather + reduce) + between * max(0.0, regather + reduce - backward_room)
    everything = forwards * (shards.layers * gather + gather_ends) + backwards * (shards.layers * reduce + reduce_ends)
    everything += between * regather + backward_runs * first_regather
    return waiting, everything - waiting


def optimizer_seconds(share: int, states: Iterable[State], cluster: Cluster) -> float:
    """Predict the seconds of the optimizer's step on one rank; it is limited by memory bandwidth.

    The step reads the gradients, reads and writes the optimizer's states, and writes the 16-bit weights.

    Args:
        share: how many parameters the rank updates.
        states: a State (name and bytes) each, in this order: weight, gradient, the optimizer's states.
        cluster: the GPUs, whose memory bandwidth is read.
    """
    weights, gradients, *own = (state.bytes_of(share) for state in states)
    return (weights + gradients + 2 * sum(own)) / cluster.device.memory_bytes_per_second
