"""python my/labs/lab7_todays_layer.py

Lab 7: today's layer (RMSNorm, grouped queries, SwiGLU), and what it saves if nothing is saved twice.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them on four ranks (--ranks 2 for two).  For a hint, add --hint 7.1.

Letters as in 2205.05198, and k key and value heads, d elements of a head, f width of the MLP.
Weights are as torch stores them, [out, in].  Save tensors for backward with ctx.save_for_backward;
what is held in any other way escapes the count.  No function may write to a tensor that it was given.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


# 7.1
def llama_layer_bytes(
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    ffn_hidden_size: int,
    tensor_parallel_size: int,
) -> dict[str, int]:
    """Return the bytes of each of the 14 tensors that a Llama layer saves for backward on one of t ranks.

    The layer has tensor and sequence parallelism and a flash kernel.  Nothing is recomputed or saved twice.
    Activations have 16 bits; the statistics of a norm (one number per token) and the log-sum-exp (one number per query
    and head) have 32.

    Args:
        seq_length: s, in tokens.
        micro_batch_size: b, in sequences.
        hidden_size: h, in elements.
        num_attention_heads: a, the query heads of all ranks together.
        num_key_value_heads: k.  Either t divides k, or k divides t; with t > k each rank has one key and value head.
        ffn_hidden_size: f, the width of the MLP, unsharded.
        tensor_parallel_size: t.

    Returns:
        A dict with the bytes of each tensor, under these names: "norm 1 input", "norm 1 statistics",
            "QKV projection input", "Q", "K", "V", "log-sum-exp", "attention projection input", "norm 2 input",
            "norm 2 statistics", "gate and up input", "gate", "up", "down input".

    Source: 2205.05198 section 4 counts the layer of 2022 in the same way.
    """
    s, b, h, f, t = seq_length, micro_batch_size, hidden_size, ffn_hidden_size, tensor_parallel_size
    a, k = num_attention_heads, num_key_value_heads
    token, head = 2 * s * b * h // t, 2 * s * b * k * (h // a) // min(t, k)
    statistics, wide = 4 * s * b // t, 2 * s * b * f // t
    return {
        "norm 1 input": token,
        "norm 1 statistics": statistics,
        "QKV projection input": token,
        "Q": token,
        "K": head,
        "V": head,
        "log-sum-exp": 4 * a * s * b // t,
        "attention projection input": token,
        "norm 2 input": token,
        "norm 2 statistics": statistics,
        "gate and up input": token,
        "gate": wide,
        "up": wide,
        "down input": wide,
    }


# given: the dtype to compute in
def wide(x: Tensor) -> Tensor:
    """Return x in float32, or x itself if its dtype is float64."""
    return x if x.dtype is torch.float64 else x.float()


# 7.2
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, with the mean over the last dimension, computed in float32.

    If x has float64, compute in float64 (wide(x) has the right dtype).  Round to x's dtype once, at the end.  To round
    also before the multiplication by weight, as Hugging Face's norm does, is right as well.

    Args:
        x: [s, b, h].
        weight: [h], in x's dtype.
        eps: a small number that keeps the square root away from 0, such as 1e-6.

    Returns:
        [s, b, h], in x's dtype.

    Saves: x and 1/rms, one float32 number per token: 2sbh + 4sb bytes in 16 bits, where torch's operators save 6sbh +
        4sb or more.
    Source: 1910.07467.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse_rms = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide(x) * inverse_rms * wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse_rms = ctx.saved_tensors
        normed = wide(x) * inverse_rms
        grad_weight = (wide(grad) * normed).flatten(0, -2).sum(0)
        grad = wide(grad) * wide(weight)
        grad_x = inverse_rms * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


# 7.3
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, where silu(x) = x · sigmoid(x).

    Args:
        gate: [s, b, f], the output of the gate linear.
        up: [s, b, f], the output of the up linear.

    Returns:
        [s, b, f], the input of the down linear.

    Saves: gate and up, 4sbf bytes in 16 bits, where two operators of torch save 6sbf.
    Source: 2002.05202.
    """
    return _SwiGLU.apply(gate, up)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return grad * up * slope, grad * gate * sigmoid


# 7.4
def split_grouped_heads(
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    projection_weight: Tensor,
    num_attention_heads: int,
    num_key_value_heads: int,
    group,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return this rank's shards of q_weight, k_weight, v_weight and projection_weight, for grouped-query attention.

    Query head i reads key and value head i // (a/k).  Rank r of t takes the a/t query heads from r·a/t on, and the key
    and value heads that these read, no others.  Either t divides k, or k divides t; with t > k several ranks take the
    same key and value head.

    Args:
        q_weight: [a·d, h], unsharded, head after head; h need not be a·d.
        k_weight: [k·d, h], unsharded, head after head.
        v_weight: [k·d, h], unsharded, head after head.
        projection_weight: [h, a·d], unsharded; its columns are in the order of the query heads.
        num_attention_heads: a, the query heads of all ranks together.
        num_key_value_heads: k, the key and value heads of all ranks together.
        group: the process group of the t ranks.

    Returns:
        This rank's shards, in this order: [a·d/t, h], [k·d/min(t, k), h], [k·d/min(t, k), h], [h, a·d/t].

    Source: 2205.05198 section 4.2.1 shards whole heads.
    """
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = min(t, num_key_value_heads)
    own = rank * parts // t
    return (
        q_weight.chunk(t)[rank],
        k_weight.chunk(parts)[own],
        v_weight.chunk(parts)[own],
        projection_weight.chunk(t, dim=1)[rank],
    )


# 7.5
def sum_shared_gradients(k_weight: Tensor, v_weight: Tensor, num_key_value_heads: int, group) -> None:
    """Complete k_weight.grad and v_weight.grad after backward, where several ranks have the same key and value head.

    Each rank computed its .grad from its own query heads only.  The gradient of a key and value head that several ranks
    have is the sum of these ranks' .grad; write that sum to .grad.  Make no process group: all ranks of group call this
    function, so use collectives of group.

    Args:
        k_weight: [k·d/min(t, k), h], this rank's shard from split_grouped_heads, with its .grad.
        v_weight: [k·d/min(t, k), h], this rank's shard from split_grouped_heads, with its .grad.
        num_key_value_heads: k, the key and value heads of all ranks together.
        group: the process group of the t ranks.

    Source: 2305.13245.
    """
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    if t <= num_key_value_heads:
        return
    own = rank * num_key_value_heads // t
    for weight in (k_weight, v_weight):
        heads = weight.grad.new_zeros(num_key_value_heads, *weight.grad.shape)
        heads[own] = weight.grad
        dist.all_reduce(heads, group=group)
        weight.grad.copy_(heads[own])
