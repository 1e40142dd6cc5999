"""Let operations on a CPU save what they save on a GPU: plans for GPUs are computed from runs on a CPU.

Three operations save more on a CPU.  ``gpu_kernels_on_cpu`` replaces them in torch's dispatcher:

- ``dropout``: a GPU's mask has one byte an element, a CPU's is of the activation's dtype.
- ``rms_norm`` (``nn.RMSNorm``): a GPU has one kernel, which saves its input and a float32 number for each row.  A CPU
  runs several operations, which save the normalized input as well, and both in float32.
- ``scaled_dot_product_attention`` with dropout: a GPU's fused kernel saves no scores; a CPU has no fused kernel with
  dropout.

The operations below differ too, but are not replaced: plans count what a CPU saves.  They were found by comparing 200
operations on a CPU and on fake CUDA tensors (torch 2.13), in float32, in bfloat16 and under autocast:

- Layer, batch and instance norm of 16-bit input: the two statistics have 4 bytes each on a GPU, 2 on a CPU.  That is 4
  bytes more for each token and layer norm.
- Attention: CUDA's kernels save 16 or 24 bytes of seeds; the memory-efficient one pads the log-sum-exp to 32 tokens,
  and flash pads heads to a multiple of 8.  In float32 grouped heads have no fused kernel.
- ``logsigmoid``: a CPU saves a buffer of its input's size as well.
- ``EmbeddingBag``: a CPU saves indices that a GPU doesn't.
- ``LSTM``, ``GRU``, ``RNN``: cuDNN saves a workspace; only a device says how large it is.
- Softmax under autocast is float32 on a GPU, of 16 bits on a CPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from actmem_more.torch_private import replaced_operations, rms_norm_backward


def gpu_kernels_on_cpu() -> AbstractContextManager[None]:
    """Return a context in which operations on a CPU save for backward what they save on a GPU.

    The context replaces ``dropout``, ``rms_norm`` and ``scaled_dot_product_attention``. Results stay the same, except
    that attention then does no dropout.
    """
    return replaced_operations(
        ("AutogradCPU", "scaled_dot_product_attention", _attention),
        ("AutogradCPU", "dropout", _dropout),
        # torch's rms_norm calls this one, and runs it as several operations on a device that has no kernel for it.
        ("CPU", "_fused_rms_norm", lambda original: _fused_rms_norm),
        ("CPU", "_fused_rms_norm_backward", lambda original: rms_norm_backward()),
    )


def _attention(original: Callable) -> Callable:
    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        return original(query, key, value, attn_mask, 0.0, is_causal, **options)

    return run


def _dropout(original: Callable) -> Callable:
    def run(x: Tensor, p: float, train: bool) -> Tensor:
        has_mask = train and 0 < p < 1 and x.numel()  # as CUDA chooses
        return torch.native_dropout(x, p, train)[0] if has_mask else original(x, p, train)

    return run


def _fused_rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Normalize; return the result, in the dtype of ``x``, and the float32 number that each row was multiplied by."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = list(range(-len(normalized_shape), 0))
    scale = (wide.square().mean(dims, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    normalized = (wide * scale).contiguous()
    return (normalized if weight is None else normalized * weight).to(x.dtype), scale.contiguous()
