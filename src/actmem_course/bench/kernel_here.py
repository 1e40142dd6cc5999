"""Which attention kernel this rank's GPU runs, or an H100 would: by the table, and by asking the GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actmem.attention_kernels import FLASH_WIDTH, KERNEL_NODES, AttentionCall, attention_kernel
from actmem.config import ConfigError
from actmem.llama_shape import LlamaShape
from actmem.measure.emulate import H100, gpu_of_this_build
from actmem_course.bench.timing import local_rank


def check_kernel(shape: LlamaShape, dtype: torch.dtype, context_parallel_size: int, context_kind: str) -> str:
    """The attention kernel of this rank's GPU by the table, or of an H100 where there is none.

    ``""`` where parts of a sequence call the flash kernel themselves.  Raises ConfigError where more is kept than the formulas say.
    """
    if context_parallel_size > 1 and context_kind != "ulysses":
        return ""
    here = torch.cuda.is_available()
    gpu = gpu_of_this_build(torch.cuda.get_device_capability(local_rank()) if here else H100)
    name, heads = _name(dtype), (shape.num_attention_heads, shape.num_key_value_heads)
    lengths = shape.seq_length, shape.seq_length
    kernel = attention_kernel(gpu, AttentionCall(name, shape.d, shape.value_size, *heads, *lengths, causal=True))
    if kernel == "math":
        raise _no_fused_kernel(shape, dtype, "a GPU of capability {}.{}".format(*gpu.capability))
    if kernel == "flash" and shape.d % FLASH_WIDTH:
        rule = f"gives heads of {shape.d}: a GPU's flash kernel keeps copies padded to a multiple of {FLASH_WIDTH}"
        raise ConfigError("num_attention_heads", rule)
    return kernel


def kernel_here(
    shape: LlamaShape, dtype: torch.dtype, device: str, context_parallel_size: int, context_kind: str
) -> str:
    """The attention kernel of this rank, ``""`` on a CPU: a GPU is asked by a small call, and the node that autograd records tells."""
    kernel = check_kernel(shape, dtype, context_parallel_size, context_kind) if device == "cuda" else ""
    if not kernel or not torch.cuda.is_available():
        return kernel
    heads = (shape.num_attention_heads, *2 * (shape.num_key_value_heads,))
    q, k, v = (
        torch.zeros(1, min(shape.seq_length, 128), count, width, device="cuda", dtype=dtype, requires_grad=True)
        for count, width in zip(heads, (shape.d, shape.d, shape.value_size))
    )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    node = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1]).grad_fn
    assert node is not None
    for kernel, name in KERNEL_NODES.items():
        if node.name().startswith(name):
            return kernel
    raise _no_fused_kernel(shape, dtype, "this GPU")


def _no_fused_kernel(shape: LlamaShape, dtype: torch.dtype, gpu: str) -> ConfigError:
    heads = f"{shape.num_attention_heads} query and {shape.num_key_value_heads} key heads of {shape.d}"
    rule = f"{_name(dtype)} with {heads} has no fused attention kernel on {gpu}, which would keep the scores"
    return ConfigError("dtype", f"{rule}: no formula here (--device cpu has one)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
