"""Find out which attention kernel this rank's GPU runs for a layer, and what this kernel saves."""

from functools import partial

import torch
import torch.nn.functional as F

from actmem.config import ConfigError
from actmem.rows import Row
from actmem_course.lab_tools.machine import local_rank
from actmem_more.attention_kernels import FLASH_WIDTH
from actmem_more.llama_shape import LlamaShape

#: The node that autograd records for each kernel; "math" is composed of other operations.
KERNEL_NODES = {
    "flash": "ScaledDotProductFlashAttention",
    "memory-efficient": "ScaledDotProductEfficientAttention",
    "cuDNN": "ScaledDotProductCudnnAttention",
}
#: Bytes of the dropout's seed and offset, which all kernels but "math" save even without dropout.
SEED_BYTES = {"flash": 24, "memory-efficient": 16, "cuDNN": 16}
#: The memory-efficient kernel pads its log-sum-exps to a multiple of so many queries.
_LOG_SUM_EXP_BLOCK = 32


def kernel_here(shape: LlamaShape, dtype: torch.dtype) -> str:
    """Return the name of the attention kernel that torch chooses on this rank's GPU for the layer.

    It runs a small call of scaled_dot_product_attention and looks at the autograd node.

    Args:
        shape: the layer, of which the numbers and sizes of heads are used.
        dtype: of Q, K and V.

    Returns: "flash", "memory-efficient" or "cuDNN".

    Raises:
        ConfigError: torch chooses no fused kernel ("math"), or the flash kernel would save padded copies of Q, K and V:
            then the formulas don't hold.
    """
    make = partial(torch.zeros, device=f"cuda:{local_rank()}", dtype=dtype, requires_grad=True)
    keys, length = shape.num_key_value_heads, min(shape.seq_length, 128)
    q = make(1, length, shape.num_attention_heads, shape.d).transpose(1, 2)
    k, v = (make(1, length, keys, width).transpose(1, 2) for width in (shape.d, shape.value_size))
    grouped = shape.num_attention_heads != keys
    node = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).grad_fn
    assert node is not None
    kernel = next((kernel for kernel, name in KERNEL_NODES.items() if node.name().startswith(name)), "math")
    if kernel == "math":
        heads = f"{shape.num_attention_heads} query and {keys} key heads of {shape.d}"
        rule = f"{dtype} with {heads} has no fused attention kernel on this GPU, which would keep the scores"
        raise ConfigError("dtype", f"{rule}: no formula here (--device cpu has one)")
    if kernel == "flash" and shape.d % FLASH_WIDTH:
        rule = f"gives heads of {shape.d}: a GPU's flash kernel keeps copies padded to a multiple of {FLASH_WIDTH}"
        raise ConfigError("num_attention_heads", rule)
    return kernel


def attention_rows(kernel: str, batch_size: int, num_heads: int, num_queries: int, split_by: int = 1) -> list[Row]:
    """List the small extra tensors that a fused attention kernel saves on one rank.

    They come in addition to Q, K, V, the output and the log-sum-exp (4 bytes for each query of each head).

    Args:
        kernel: "flash", "memory-efficient" or "cuDNN", from ``kernel_here``.
        batch_size: b, in sequences.
        num_heads: how many query heads this rank has.
        num_queries: s, the queries of each head.
        split_by: how many ranks share the heads.

    Returns: a row for the seed of the dropout, and with "memory-efficient" a row for the padding of the log-sum-exp.

    Raises:
        ValueError: ``kernel`` is "math", which saves the scores.
    """
    if kernel == "math":
        raise ValueError("math keeps the scores: it has no rows here")
    reason = f"the {kernel} kernel keeps its random numbers' seed and offset, with no dropout too"
    rows = [Row("attention seed", SEED_BYTES[kernel], 1, f"{kernel} attention", reason)]
    if kernel == "memory-efficient" and (missing := -num_queries % _LOG_SUM_EXP_BLOCK):
        padding = 4 * batch_size * num_heads * missing
        reason = f"padded to a multiple of {_LOG_SUM_EXP_BLOCK} queries"
        rows.append(Row("log-sum-exp", padding, split_by, f"{kernel} attention", reason))
    return rows
