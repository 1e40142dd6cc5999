"""Right answers to lab 3: g and ḡ, the linears, the layer, partial gradients, generators."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from actmem_course.judge.cases.lab3_sequence_parallel import PARTIAL
from actmem_course.judge.solutions.lab3_sequence_parallel import g_bar, gathering_linear
from actmem_course.reference_layer import core_attention, gelu, layer_norm, merge_heads, split_heads
from tests.right_answers.register import applied, mesh_of, right


@right("3.1")
def g_by_dtensor(x, group):
    sharded = DTensor.from_local(x, mesh_of(group), [Shard(0)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


@right("3.1")
def g_by_functional_collectives(x, group):
    return functional.all_gather_tensor_autograd(x, 0, group)


@right("3.2")
def g_bar_by_all_to_all(x, group):
    def forward(ctx, x):
        shares = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(shares, x.contiguous(), group=group)
        return shares.view(dist.get_world_size(group), -1, *x.shape[1:]).sum(0)

    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, grad.contiguous(), group=group)
        return torch.cat(parts)

    return applied(forward, backward, x)


@right("3.5")
def shard_keeping_by_torchs_checkpoint(x, weight, bias, group):
    return checkpoint(gathering_linear, x, weight, bias, group, use_reentrant=False)


@right("3.4")
def layer_with_biases_from_rank_0(x, w, dropouts, linear, group):
    # Times 0 on the others: the sum over the ranks holds each bias once, and so does the sum of its gradients.
    heads, once = w.num_attention_heads // dist.get_world_size(group), dist.get_rank(group) == 0
    qkv = linear(layer_norm(x, w.norm1_weight, w.norm1_bias), weight=w.qkv_weight, bias=w.qkv_bias, group=group)
    context = merge_heads(core_attention(*split_heads(qkv, heads), dropouts.core), x.shape[1])
    x = x + dropouts.block(g_bar(F.linear(context, w.projection_weight, w.projection_bias * once), group))
    y = gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group))
    return x + dropouts.block(g_bar(F.linear(y, w.down_weight, w.down_bias * once), group))


@right("3.6")
def gradients_summed_on_rank_0_and_sent_to_all(w, group):
    first = dist.get_global_rank(group, 0)
    for name in PARTIAL:
        dist.reduce(getattr(w, name).grad, first, group=group)
        dist.broadcast(getattr(w, name).grad, first, group=group)


@right("3.7")
def one_generator_for_both_under_sequence_parallelism(seed, sequence_parallel, device, group):
    core = torch.Generator(device).manual_seed(seed * 7919 + 1 + dist.get_rank(group))
    return core, core if sequence_parallel else torch.Generator(device).manual_seed(seed)
