"""How a job is laid out over its devices: one value for each axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from actmem.config import LARGEST_PARALLEL_SIZE, ConfigError, Parallel, check_choice, check_size

#: What ZeRO divides among the data-parallel ranks (1910.02054): nothing, optimizer states, gradients
#: as well, weights as well (FSDP).
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Layout:
    """Sizes of every axis.  Devices: data · context · pipeline · tensor; the tensor ranks share experts.

    zero_stage: one of ZERO_STAGES.  micro_batch_size: sequences (b).  Raises ConfigError on a bad size.
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    micro_batch_size: int = 1
    num_model_chunks: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = True
    zero_stage: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "context"):
            check_size(f"{name}_parallel_size", getattr(self, f"{name}_parallel_size"), LARGEST_PARALLEL_SIZE)
        check_size("micro_batch_size", self.micro_batch_size)
        check_choice("zero_stage", self.zero_stage, ZERO_STAGES)
        _ = self.parallel  # checks the other sizes

    @cached_property
    def parallel(self) -> Parallel:
        """The axes that share one copy of the model: t, p, m."""
        p, m = self.pipeline_parallel_size, self.num_model_chunks
        return Parallel(self.tensor_parallel_size, self.sequence_parallel, p, m)

    @cached_property
    def within_layer(self) -> Parallel:
        """The axes that one layer sees: t, and whether the sequence is cut too."""
        return Parallel(self.tensor_parallel_size, self.sequence_parallel)

    @property
    def shared(self) -> str:
        """What the tensor-parallel ranks share, as the names of stored tapes say it."""
        return "alone" if self.tensor_parallel_size == 1 else "sequence" if self.sequence_parallel else "tensor"

    @cached_property
    def stage_axes(self) -> Layout:
        """What a stage's activations depend on: this layout without data-parallel ranks."""
        return replace(self, data_parallel_size=1, zero_stage=1)

    @cached_property
    def layer_axes(self) -> Layout:
        """What a layer's tensors depend on: t, c, b and whether the sequence is cut."""
        return replace(self.stage_axes, pipeline_parallel_size=1, num_model_chunks=1)

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        t, p = self.tensor_parallel_size, self.pipeline_parallel_size
        return self.replicas * t * p

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, and among which ZeRO divides: data · context."""
        return self.data_parallel_size * self.context_parallel_size

    def num_microbatches(self, global_batch_size: int) -> int:
        """Microbatches of one step on one data-parallel rank: global batch / (data · b).

        Raises ConfigError if there is a remainder.
        """
        per_pass = self.data_parallel_size * self.micro_batch_size
        if global_batch_size % per_pass:
            sizes = f"data_parallel_size · micro_batch_size = {self.data_parallel_size} · {self.micro_batch_size}"
            raise ConfigError("global_batch_size", f"{global_batch_size} must be divisible by {sizes}")
        return global_batch_size // per_pass
