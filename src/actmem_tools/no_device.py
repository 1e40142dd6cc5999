"""Let fake CUDA tensors run on a machine without a GPU.

Two things would call the GPU driver and are replaced: random generators, and torch's choice of an attention kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.config import ConfigError
from actmem.ledger.storages import replaced
from actmem_more.attention_kernels import FLASH_WIDTH, AttentionCall, Gpu, attention_kernel
from actmem_more.torch_private import cudnn_attention, efficient_attention, flash_attention, replaced_operations
from actmem_tools.torch_private import torch_release

#: The first torch that runs fake CUDA tensors without a driver.
OLDEST = (2, 11)
#: Bytes of the state of a GPU's generator (Philox): a seed and an offset of 8 bytes each.
_STATE_BYTES = 16
#: Compute capability of an H100.
H100 = (9, 0)
#: The memory-efficient kernel reads a mask's rows by blocks of this many elements.
_MASK_WIDTH = 8


def gpu_of_this_build(capability: tuple[int, int] = H100) -> Gpu:
    """Return a Gpu for ``cuda_without_device``, with the versions of cuDNN and torch that are installed here.

    Args:
        capability: the compute capability of the GPU to imitate, (major, minor); the default is an H100's.
    """
    return Gpu(capability, torch.backends.cudnn.version() or 0, torch_release())


@contextmanager
def cuda_without_device(gpu: Gpu | None = None) -> Iterator[None]:
    """Make a context in which a forward pass on fake CUDA tensors saves for backward what it would save on a GPU.

    The context needs a CUDA build of torch, but no GPU and no driver.  Only the forward pass of fake tensors works:
    backward fails, because autograd starts a thread for the GPU.

    Args:
        gpu: the GPU to imitate, on which the choice of the attention kernel depends; None: an H100 with the installed
            cuDNN and torch.

    Raises: ConfigError on torch before 2.11, where a linear layer calls the driver and the process aborts.
    """
    if torch_release() < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ConfigError("device", f"fake cuda without a GPU needs torch {needed}, this is {torch.__version__}")
    gpu = gpu or gpu_of_this_build()
    with replaced(torch, "Generator", lambda original: _Generator):
        with replaced_operations(("AutogradCUDA", "scaled_dot_product_attention", partial(_attention, gpu))):
            yield


class _Generator(torch.Generator):
    """Stands in for ``torch.Generator``: for a CUDA device, a generator that only has a state of the right size.

    For other devices ``_Generator(device)`` is torch's own generator.
    """

    def __new__(cls, device: Any = "cpu"):
        # The stub says nothing of arguments here.
        return super().__new__(cls, "cpu") if torch.device(device).type == "cuda" else _Plain(device)  # type: ignore[call-arg]

    def get_state(self):
        return torch.frombuffer(bytearray(_STATE_BYTES), dtype=torch.uint8)

    def set_state(self, state):
        return self


_Plain = torch.Generator


def _attention(gpu: Gpu, original):
    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        kernel = "math"
        if query.is_cuda and query.dim() == 4:
            heads, lengths = (query.shape[1], key.shape[1]), (query.shape[2], key.shape[2])
            sizes = query.shape[3], value.shape[3], *heads, *lengths
            dtype = str(query.dtype).removeprefix("torch.")
            call = AttentionCall(dtype, *sizes, attn_mask is not None, is_causal, dropout_p)
            kernel = attention_kernel(gpu, call)
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


def _bias(mask: Tensor, query: Tensor, key: Tensor, kernel: str) -> Tensor:
    """Return the mask as cuDNN's and the memory-efficient kernel save it, expanded to the scores' shape.

    A boolean mask becomes numbers that are added to the scores.  For the memory-efficient kernel the mask's rows are
    padded.
    """
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    if kernel == "memory-efficient" and any(stride % _MASK_WIDTH for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, _MASK_WIDTH - mask.shape[-1] % _MASK_WIDTH))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:3], key.shape[2])
