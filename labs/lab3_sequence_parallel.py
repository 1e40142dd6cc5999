"""python my/labs/lab3_sequence_parallel.py

Lab 3: sequence parallelism (2205.05198 section 4.2.2).

Read notebooks/04_sequence_parallelism.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them on four ranks (--ranks 2 for two).  For a hint, add --hint 3.1.

Activations are [s, b, h], sequence first; rank r of t holds tokens r·s/t and up.  Weights are as
torch stores them, [out, in].  group is a process group: dist.get_world_size(group) is t,
dist.get_rank(group) is r.  No function may write to a tensor that it was given.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from actmem_course.reference_layer import (
    Dropouts,
    LayerWeights,
    core_attention,
    gelu,
    layer_norm,
    merge_heads,
    split_heads,
)


# 3.1: read “The ranks, before and after”
def g(x: Tensor, group) -> Tensor:
    """Enter a tensor-parallel block: gather the tokens of all ranks.  x and its gradient need not be contiguous.

    Args:
        x: [s/t, b, h], this rank's tokens.

    Returns:
        [s, b, h].  The incoming gradient differs from rank to rank; the one passed on must be that of the whole
        output.

    Collectives: one in each pass; send no more than needed (no all-reduce).
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.2: read “The ranks, before and after”
def g_bar(x: Tensor, group) -> Tensor:
    """Leave a tensor-parallel block: this rank's tokens of the sum of the ranks' x.

    Args:
        x: [s, b, h], different on every rank.

    Returns:
        [s/t, b, h].  The incoming gradient is that of this rank's tokens.

    Collectives: one in each pass; send no more than needed (no all-reduce).
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.3: read “What plain autograd saves”
def gathering_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """A column-parallel linear that begins with g, the plain way: g, then F.linear.

    Args:
        x: [s/t, b, in], this rank's tokens.
        weight: [out/t, in], this rank's.
        bias: [out/t], this rank's.

    Returns:
        [s, b, out/t].

    Collectives: one all-gather in forward and one reduce-scatter in backward.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.4: read “The ranks, before and after”
def layer(x: Tensor, w: LayerWeights, dropouts: Dropouts, linear, group) -> Tensor:
    """One transformer layer under tensor and sequence parallelism.

    It is x + dropout(attention(norm(x))), and the same with the MLP.

    Use these:
        layer_norm(x, weight, bias), gelu(x).
        split_heads(qkv, heads_here): [s, b, 3·n·d] to q, k, v, each [b·n, s, d], for n heads here.
        core_attention(q, k, v, dropout): [b·n, s, d].
        merge_heads(context, b): [b·n, s, d] back to [s, b, n·d], for b sequences.

    Args:
        x: [s/t, b, h], this rank's tokens.
        w: this rank's weights: norm1_weight, norm1_bias, qkv_weight, qkv_bias, projection_weight, projection_bias,
            norm2_weight, norm2_bias, up_weight, up_bias, down_weight, down_bias.  w.num_attention_heads is a, of all
            ranks together.
        dropouts: core is for the attention weights, block for what is added to x.
        linear: the column-parallel linear to use, with gathering_linear's arguments; it gathers the tokens.

    Returns:
        [s/t, b, h].

    Collectives: in each pass, with gathering_linear, 2 all-gathers and 2 reduce-scatters.
    Source: 2205.05198 figure 5.
    """
    raise NotImplementedError


# 3.5: read “Gather again in the backward pass”
def shard_keeping_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """The same as gathering_linear, but saves only x for backward: this rank's tokens.

    Args:
        x: [s/t, b, in], this rank's tokens.
        weight: [out/t, in], this rank's.
        bias: [out/t], this rank's.

    Returns:
        [s, b, out/t].

    Collectives: one all-gather in forward, one all-gather and one reduce-scatter in backward.
    Saves: x; weight doesn't count, which is there anyway.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.6: read “Partial gradients”
def sum_partial_gradients(w: LayerWeights, group) -> None:
    """Complete every .grad in w after the backward of layer.

    Some parameters of w saw only this rank's tokens, so their .grad is one term of a sum over the ranks.  Complete
    those and leave the others unchanged.

    Args:
        w: the weights of layer; w.named() is a dict of all twelve by name.

    Collectives: of the partial gradients, and of no others.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.7: read “The ranks, before and after”
def dropout_generators(seed: int, sequence_parallel: bool, device, group) -> tuple[torch.Generator, torch.Generator]:
    """The two generators that a layer's dropouts draw from.

    Ranks that hold the same tensor must drop the same elements of it; where they hold different ones, they must drop
    independently.  Leave torch's default generator alone.

    Args:
        seed: another seed gives other numbers, the same seed the same.
        sequence_parallel: without it, block works on [s, b, h] that is the same on every rank; with it, on this
            rank's [s/t, b, h].
        device: for torch.Generator(device).

    Returns:
        The generator of Dropouts.core, and that of Dropouts.block.

    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError
