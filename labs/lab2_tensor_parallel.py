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
    """Enter a tensor-parallel block: return x, from which each rank then computes a different part of the output.

    Write a torch.autograd.Function, and call its apply.

    Args:
        x: [s, b, h], the same on every rank.
        group: the process group of the t ranks.

    Returns:
        x, [s, b, h].  In backward each rank is given the gradient that comes from its own part of the output; return
        the gradient of x that comes from all ranks' parts together.

    Collectives: one all-reduce in all, either in forward or in backward.
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
        group: the process group of the t ranks.

    Returns:
        The sum, [s, b, h], the same on every rank.  The gradient that this sum gets in backward is the same on every
        rank, too.

    Collectives: one all-reduce in all, either in forward or in backward.
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.3: read “Columns, then rows”
def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """Run a linear whose output features are sharded over the ranks: return this rank's output features.

    Args:
        x: [s, b, in], the same on every rank.
        weight: [out/t, in], this rank's rows of the unsharded weight.
        bias: [out/t], this rank's part of the unsharded bias.
        group: the process group of the t ranks.

    Returns:
        [s, b, out/t], this rank's output features.

    Collectives: none in forward and one all-reduce in backward.
    Saves: x.
    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.4: read “Columns, then rows”
def row_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """Run a linear whose input features are sharded over the ranks: return the output, summed over the ranks.

    Args:
        x: [s, b, in/t], this rank's input features.
        weight: [out, in/t], this rank's columns of the unsharded weight.
        bias: [out], unsharded, the same on every rank; the output contains it once.
        group: the process group of the t ranks.

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
        projection_weight: [h, h], unsharded; its columns are in the order of the heads.
        num_attention_heads: a, of all ranks together.
        group: the process group of the t ranks.

    Returns:
        This rank's qkv_weight, [3h/t, h]: its rows of Q, then of K, then of V.
        This rank's projection_weight, [h, h/t].

    Source: 2205.05198 section 4.2.1.
    """
    raise NotImplementedError


# 2.6: read “Columns, then rows”
def mlp(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor, group) -> Tensor:
    """Compute the tensor-parallel MLP: a linear h → 4h, gelu, a linear 4h → h.

    Args:
        x: [s, b, h], the same on every rank.
        up_weight: [4h/t, h], this rank's rows of the unsharded weight.
        up_bias: [4h/t], this rank's part of the unsharded bias.
        down_weight: [h, 4h/t], this rank's columns of the unsharded weight.
        down_bias: [h], unsharded, the same on every rank.
        group: the process group of the t ranks.

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
    """Compute tensor-parallel self-attention, with a/t heads on each rank.

    Use these functions, where n is the number of heads on this rank and d the size of a head:
        split_heads(qkv, n) turns [s, b, 3·n·d] into q, k, v, each [b·n, s, d].
        core_attention(q, k, v) returns the context, [b·n, s, d].
        merge_heads(context, b) turns [b·n, s, d] into [s, b, n·d].

    Args:
        x: [s, b, h], the same on every rank.
        qkv_weight: [3h/t, h], this rank's, from split_attention.
        qkv_bias: [3h/t], this rank's, in the order of qkv_weight's rows.
        projection_weight: [h, h/t], this rank's, from split_attention.
        projection_bias: [h], unsharded, the same on every rank.
        num_attention_heads: a, of all ranks together.
        group: the process group of the t ranks.

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
        group: the process group of the t ranks.

    Returns:
        [s, b], the same on every rank.

    Collectives: in all they send three numbers per position, never the logits.
    Source: 2205.05198 section 4.3.
    """
    raise NotImplementedError
