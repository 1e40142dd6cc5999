"""python my/labs/lab2_tensor_parallel.py

Lab 2: tensor parallelism (2205.05198 section 4.2.1).

Read notebooks/03_tensor_parallelism.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them on four ranks (--ranks 2 for two).  For a hint, add --hint 2.1.

Activations are [s, b, h], sequence first.  Weights are as torch stores them, [out, in].
group is a process group of t ranks: dist.get_world_size(group), dist.get_rank(group).
No function may write to a tensor that it was given.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from actmem_course.reference_layer import core_attention, gelu, merge_heads, split_heads


# 2.1: read “f and f̄”
def f(x: Tensor, group) -> Tensor:
    """Enter a tensor-parallel block: from here on each rank computes a different part of the output.

    Write a torch.autograd.Function, and call its apply.

    Args:
        x: [s, b, h], the same on every rank.

    Returns:
        x, [s, b, h].  In backward the ranks get different gradients for it; return the gradient of x for the whole
        output, all ranks' parts together.

    Collectives: one all-reduce, in forward and backward together.
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.2: read “f and f̄”
def f_bar(x: Tensor, group) -> Tensor:
    """Leave a tensor-parallel block: return the sum of x over the ranks.

    Write a torch.autograd.Function, and call its apply.

    Args:
        x: [s, b, h], different on every rank.

    Returns:
        [s, b, h], the same on every rank.  The gradient that it gets in backward is the same on every rank, too.

    Collectives: one all-reduce, in forward and backward together.
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.3: read “Columns, then rows”
def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """A linear whose output features are sharded over the ranks: return this rank's output features.

    Args:
        x: [s, b, in], the same on every rank.
        weight: [out/t, in], this rank's.
        bias: [out/t], this rank's.

    Returns:
        [s, b, out/t].

    Collectives: none in forward and one all-reduce in backward.
    Saves: x.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.4: read “Columns, then rows”
def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """A linear whose input features are sharded over the ranks: return the output, summed over the ranks.

    Args:
        x: [s, b, in/t], this rank's.
        weight: [out, in/t], this rank's.
        bias: [out], the same on every rank.

    Returns:
        [s, b, out], the same on every rank.

    Collectives: one all-reduce in forward and none in backward.
    Saves: x.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.5: read “Attention: whole heads”
def split_attention(
    qkv_weight: Tensor, projection_weight: Tensor, num_attention_heads: int, group
) -> tuple[Tensor, Tensor]:
    """Return this rank's shards of the two weights of self-attention; each rank computes a/t heads.

    Args:
        qkv_weight: [3h, h], unsharded; its rows are those of Q, then of K, then of V, each head by head.
        projection_weight: [h, h], unsharded.
        num_attention_heads: a.

    Returns:
        This rank's qkv_weight, [3h/t, h], in the same order.
        This rank's projection_weight, [h, h/t].

    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.6: read “Columns, then rows”
def mlp(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor, group) -> Tensor:
    """The tensor-parallel MLP: a linear h → 4h, gelu, a linear 4h → h.

    Args:
        x: [s, b, h], the same on every rank.
        up_weight: [4h/t, h], this rank's.
        up_bias: [4h/t], this rank's.
        down_weight: [h, 4h/t], this rank's.
        down_bias: [h], the same on every rank.

    Returns:
        [s, b, h], the same on every rank.

    Collectives: one all-reduce in forward and one in backward.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.7: read “Attention: whole heads”
def attention(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    projection_weight: Tensor,
    projection_bias: Tensor,
    num_attention_heads: int,
    group,
) -> Tensor:
    """Self-attention with a/t heads on each rank.

    Use these:
        split_heads(qkv, heads_here): [s, b, 3·n·d] to q, k, v, each [b·n, s, d], for n heads here.
        core_attention(q, k, v): [b·n, s, d].
        merge_heads(context, b): [b·n, s, d] back to [s, b, n·d], for b sequences.

    Args:
        x: [s, b, h], the same on every rank.
        qkv_weight: [3h/t, h], as split_attention gives it.
        qkv_bias: [3h/t], this rank's.
        projection_weight: [h, h/t], as split_attention gives it.
        projection_bias: [h], the same on every rank.
        num_attention_heads: a, of all ranks together.

    Returns:
        [s, b, h], the same on every rank.

    Collectives: one all-reduce in forward and one in backward.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.8, advanced: read “The loss, sharded”
def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group) -> Tensor:
    """Return the cross entropy of each position, from logits whose vocabulary is sharded over the ranks.

    Args:
        logits: [s, b, v/t], of this rank's part of the vocabulary: on rank r the v/t ids from r·v/t on.
        targets: [s, b], ids from 0 to v − 1, the same on every rank.

    Returns:
        [s, b], the same on every rank.

    Collectives: together they send three numbers per position, never the logits.
    Source: 2205.05198 section 4.3.
    """
    raise NotImplementedError
