"""What a GPU would keep, on a machine without one: fake CUDA tensors on a CUDA build of torch, with no driver.

Forward passes of fake tensors run, and keep what CUDA's kernels keep.  Two things ask for the
device itself and are replaced: generators, and the choice of an attention kernel.  Backward does
not run: autograd starts a thread for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from actmem.measure.replace import replaced
from actmem.torch_private import flash_attention

#: Philox: a seed and an offset of 8 bytes each.
_STATE_BYTES = 16
_LARGEST_HEAD = 256


@contextmanager
def cuda_without_device() -> Iterator[None]:
    """In the block, generators on ``cuda`` and ``scaled_dot_product_attention`` work on fake tensors.

    Needs a CUDA build of torch, and fake tensors.  Attention without a mask, in 16 bits, takes the
    flash kernel, as on GPUs since 2020; any other takes torch's own formula.
    """
    with replaced(torch, "Generator", lambda original: _Generator):
        with replaced(F, "scaled_dot_product_attention", _flash):
            yield


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


def _flash(original):
    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        flash = attn_mask is None and query.dtype in (torch.float16, torch.bfloat16)
        if not (query.is_cuda and flash and query.dim() == 4 and query.shape[-1] <= _LARGEST_HEAD):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        return flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale)[0]

    return run
