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
        group: the process group of the t ranks.

    Returns:
        The tokens of all ranks, [s, b, h].  In backward each rank is given the gradient that comes from its own part
        of the block's output; return the gradient of x that comes from all ranks' parts together.

    Collectives: one in each pass; send no more than needed (no all-reduce).
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.2: read “The ranks, before and after”
def g_bar(x: Tensor, group) -> Tensor:
    """Leave a tensor-parallel block: sum x over the ranks, and return this rank's tokens of the sum.

    Args:
        x: [s, b, h], different on every rank.
        group: the process group of the t ranks.

    Returns:
        This rank's tokens of the sum, [s/t, b, h].  In backward each rank is given the gradient of these tokens.

    Collectives: one in each pass; send no more than needed (no all-reduce).
    Saves: nothing for backward.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.3: read “What plain autograd saves”
def gathering_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """Run a column-parallel linear under sequence parallelism in its plain form: g, then F.linear.

    Args:
        x: [s/t, b, in], this rank's tokens.
        weight: [out/t, in], this rank's rows of the unsharded weight.
        bias: [out/t], this rank's part of the unsharded bias.
        group: the process group of the t ranks.

    Returns:
        [s, b, out/t]: all tokens, this rank's output features.

    Collectives: one all-gather in forward and one reduce-scatter in backward.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.4: read “The ranks, before and after”
def layer(x: Tensor, w: LayerWeights, dropouts: Dropouts, linear, group) -> Tensor:
    """Run one transformer layer under tensor and sequence parallelism.

    First compute y = x + dropout(attention(norm1(x))); the output is y + dropout(mlp(norm2(y))).

    Use these functions, where n is the number of heads on this rank and d the size of a head:
        layer_norm(x, weight, bias), gelu(x).
        split_heads(qkv, n) turns [s, b, 3·n·d] into q, k, v, each [b·n, s, d].
        core_attention(q, k, v, dropout) returns the context, [b·n, s, d].
        merge_heads(context, b) turns [b·n, s, d] into [s, b, n·d].

    Args:
        x: [s/t, b, h], this rank's tokens.
        w: this rank's weights: norm1_weight, norm1_bias, qkv_weight, qkv_bias, projection_weight, projection_bias,
            norm2_weight, norm2_bias, up_weight, up_bias, down_weight, down_bias.  w.num_attention_heads is a, of all
            ranks together.
        dropouts: dropouts.core is for the attention weights, dropouts.block for the outputs of attention and MLP.
        linear: the column-parallel linear to call, such as gathering_linear, with gathering_linear's arguments; it
            gathers the tokens itself.
        group: the process group of the t ranks.

    Returns:
        The layer's output for this rank's tokens, [s/t, b, h].

    Collectives: with gathering_linear, 2 all-gathers and 2 reduce-scatters in forward, and as many in backward.
    Source: 2205.05198 figure 5.
    """
    raise NotImplementedError


# 3.5: read “Gather again in the backward pass”
def shard_keeping_linear(x: Tensor, weight: Tensor, bias: Tensor, group) -> Tensor:
    """Compute the same as gathering_linear, but save only x for backward, this rank's tokens.

    Args:
        x: [s/t, b, in], this rank's tokens.
        weight: [out/t, in], this rank's rows of the unsharded weight.
        bias: [out/t], this rank's part of the unsharded bias.
        group: the process group of the t ranks.

    Returns:
        [s, b, out/t]: all tokens, this rank's output features.

    Collectives: one all-gather in forward, one all-gather and one reduce-scatter in backward.
    Saves: x.  The weight doesn't count, because it is in memory anyway.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.6: read “Partial gradients”
def sum_partial_gradients(w: LayerWeights, group) -> None:
    """Make every .grad in w the gradient for the tokens of all ranks, after the backward of layer.

    Some parameters of w saw only this rank's tokens, so their .grad is one term of a sum over the ranks.  Replace that
    .grad by the sum, and leave the gradients of all other parameters unchanged.

    Args:
        w: the weights that were given to layer; w.named() is a dict of all twelve by name.
        group: the process group of the t ranks.

    Collectives: they send only the gradients that need the sum.
    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError


# 3.7: read “The ranks, before and after”
def dropout_generators(seed: int, sequence_parallel: bool, device, group) -> tuple[torch.Generator, torch.Generator]:
    """Make the two random-number generators from which a layer's dropouts draw.

    Where the ranks hold the same tensor, they must all drop the same elements of it.  Where they hold different
    tensors, they must drop independently.  Don't use torch's default generator.

    Args:
        seed: the same seed gives the same random numbers, another seed gives others.
        sequence_parallel: if False, Dropouts.block works on [s, b, h], the same on every rank; if True, on this rank's
            [s/t, b, h].
        device: the device of the tensors, such as "cuda", for torch.Generator(device).
        group: the process group of the t ranks.

    Returns:
        The generator for Dropouts.core, then the generator for Dropouts.block.

    Source: 2205.05198 section 4.2.2.
    """
    raise NotImplementedError
