"""Devices and links as their data sheets state them, and the assumptions of the time model."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.checks import ConfigError, check_size, shown
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND

GIBIBYTE = 2**30


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
