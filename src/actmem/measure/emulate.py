"""Emulate one rank of many in one process: real code, and collectives that send nothing.

torch's fake backend completes every collective at once, with a result of the right shape and
meaningless values (at most a copy of this rank's input).  On a CPU the tensors are fake too: they
have shapes, dtypes and storages with sizes, but no memory, so a laptop can run a layer of the 1T
model; so are CUDA's where there is no GPU (``cuda_without_device``).  On a GPU they are real: real
kernels and real memory on a single device.  To measure times on a CPU, ask for real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from actmem.attention_kernels import FLASH_WIDTH, AttentionCall, Gpu, attention_kernel
from actmem.config import ConfigError, check_size
from actmem.measure.tools import replaced
from actmem.parallel import collectives
from actmem.torch_private import (
    attention_on,
    cudnn_attention,
    efficient_attention,
    fake_store,
    fake_tensors,
    flash_attention,
    torch_release,
)


@contextmanager
def emulated_rank(world_size: int, rank: int = 0, device: str = "cpu", *, real_tensors: bool = False) -> Iterator[None]:
    """Act as rank ``rank`` of ``world_size`` while the block runs.

    Creates the default process group.  On ``"cpu"``, and on ``"cuda"`` without a GPU, every tensor
    created inside is fake, unless ``real_tensors``.  Raises ConfigError on a bad size, or if a process group already exists.
    """
    check_size("world_size", world_size)
    check_size("rank", rank, world_size - 1, least=0)
    if dist.is_initialized():
        raise ConfigError("emulate", "this process is already a rank of a real process group")
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            if real_tensors or device == "cuda" and torch.cuda.is_available():
                stack.enter_context(_written_results())
            else:
                stack.enter_context(fake_tensors())
                if device == "cuda":
                    stack.enter_context(cuda_without_device())
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _written_results() -> Iterator[None]:
    """Make reduce-scatter write this rank's own part if the fake backend writes nothing.

    Before torch 2.13 it wrote nothing.  Unwritten memory can hold infinities and NaNs, which spread
    to every value and change how fast kernels run.
    """
    own, everything = torch.zeros(1), torch.ones(dist.get_world_size())
    collectives.torch_reduce_scatter(own, everything)
    if own.item() == 1:
        yield
        return

    def writing(reduce_scatter):
        def run(result: Tensor, x: Tensor, **options):
            result.copy_(x.chunk(dist.get_world_size(options["group"]))[dist.get_rank(options["group"])])
            return reduce_scatter(result, x, **options)

        return run

    with replaced(collectives, "torch_reduce_scatter", writing):
        yield


#: Philox: a seed and an offset of 8 bytes each.
_STATE_BYTES = 16
#: Its compute capability.
H100 = (9, 0)
#: The memory-efficient kernel reads a mask's rows by blocks of this many elements.
_MASK_WIDTH = 8


def gpu_of_this_build(capability: tuple[int, int] = H100) -> Gpu:
    """A GPU of this compute capability with the cuDNN and the torch that are installed."""
    return Gpu(capability, torch.backends.cudnn.version() or 0, torch_release())


@contextmanager
def cuda_without_device(gpu: Gpu | None = None) -> Iterator[None]:
    """In the block, fake CUDA tensors keep what a GPU would, on a machine without one and without a driver.

    Needs a CUDA build of torch, and fake tensors.  gpu: whose choice of a kernel; an H100's by default.  Two things ask for
    the device itself and are replaced: generators, and the choice of an attention kernel.  Backward does not run:
    autograd starts a thread for the device.
    """
    gpu = gpu or gpu_of_this_build()
    with replaced(torch, "Generator", lambda original: _Generator):
        with attention_on("CUDA", lambda original: _attention(original, gpu)):
            yield


@contextmanager
def fused_attention_on_cpu() -> Iterator[set[float]]:
    """In the block, attention with dropout keeps on a CPU what a GPU's fused kernel does, but for its seed: no scores.

    A CPU's fused kernel has no dropout, and math would run in its place.  Results are those without dropout.  Yields the
    dropouts that were left out.
    """
    left_out: set[float] = set()

    def without_dropout(original):
        def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
            if dropout_p:
                left_out.add(dropout_p)
            return original(query, key, value, attn_mask, 0.0, is_causal, **options)

        return run

    with attention_on("CPU", without_dropout):
        yield left_out


class _Generator(torch.Generator):
    """A generator that nothing draws from, with the state of CUDA's; on a CPU a plain one."""

    def __new__(cls, device: Any = "cpu"):
        # The stub says nothing of arguments here.
        return super().__new__(cls, "cpu") if torch.device(device).type == "cuda" else _Plain(device)  # type: ignore[call-arg]

    def get_state(self):
        return torch.frombuffer(bytearray(_STATE_BYTES), dtype=torch.uint8)

    def set_state(self, state):
        return self


_Plain = torch.Generator


def _attention(original, gpu: Gpu):
    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        kernel = "math"
        if query.is_cuda and query.dim() == 4:
            kernel = attention_kernel(gpu, _call(query, key, value, attn_mask, dropout_p, is_causal))
        if kernel == "math":
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        width, scale = query.shape[-1], query.shape[-1] ** -0.5 if scale is None else scale
        if kernel == "flash":
            if not width % FLASH_WIDTH:
                return flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            padded = (F.pad(x, (0, -width % FLASH_WIDTH)) for x in (query, key, value))
            return flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
        bias = None if attn_mask is None else _bias(attn_mask, query, key, kernel)
        if kernel == "cuDNN":
            return cudnn_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return efficient_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

    return run


def _call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> AttentionCall:
    dtype = str(query.dtype).removeprefix("torch.")
    heads, lengths = (query.shape[1], key.shape[1]), (query.shape[2], key.shape[2])
    return AttentionCall(dtype, query.shape[3], value.shape[3], *heads, *lengths, mask is not None, causal, dropout)


def _bias(mask: Tensor, query: Tensor, key: Tensor, kernel: str) -> Tensor:
    """A mask as these kernels keep it: a boolean one as numbers to add, its rows padded for the memory-efficient kernel."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    if kernel == "memory-efficient" and any(stride % _MASK_WIDTH for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, _MASK_WIDTH - mask.shape[-1] % _MASK_WIDTH))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:3], key.shape[2])
