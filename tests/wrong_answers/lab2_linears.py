"""Wrong answers to lab 2: linears, blocks, loss."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F

from actmem.lab.pieces import core_attention, gelu, merge_heads, split_heads
from actmem.lab.solutions.lab2_tensor_parallel import column_parallel_linear, f, f_bar, row_parallel_linear
from tests.wrong_answers.planted import planted

LAB = "lab2_tensor_parallel"


def rank_and_size(group):
    return dist.get_rank(group), dist.get_world_size(group)


@planted(LAB, "2.3", r"own part only: x must enter through f")
def column_without_f(x, weight, bias, group):
    return F.linear(x, weight, bias)


@planted(LAB, "2.3", r"lacks the bias")
def column_without_bias(x, weight, bias, group):
    return F.linear(f(x, group), weight)


@planted(LAB, "2.3", r"gathered from all ranks")
def column_gathers_its_output(x, weight, bias, group):
    return torch.cat(differentiable.all_gather(F.linear(f(x, group), weight, bias), group=group), -1)


@planted(LAB, "2.3", r"different output features")
def column_sums_its_output(x, weight, bias, group):
    return f_bar(F.linear(f(x, group), weight, bias), group)


@planted(LAB, "2.3", r"gradient of weight is summed over the ranks")
def column_with_f_on_the_weight(x, weight, bias, group):
    return F.linear(f(x, group), f(weight, group), bias)


@planted(LAB, "2.3", r"t times what it should be: it is all-reduced twice")
def column_with_f_twice(x, weight, bias, group):
    return F.linear(f(f(x, group), group), weight, bias)


@planted(LAB, "2.3", r"keeps 1,\d+ B for backward where 576 B are enough")
def column_keeps_a_second_copy(x, weight, bias, group):
    y = f(x, group)
    return F.linear(y.clone(), weight, bias) + 0 * (y * y).sum()


@planted(LAB, "2.4", r"holds the bias t times")
def row_with_bias_on_every_rank(x, weight, bias, group):
    return f_bar(F.linear(x, weight, bias), group)


@planted(LAB, "2.4", r"this rank's part only: .*f_bar")
def row_without_f_bar(x, weight, bias, group):
    return F.linear(x, weight, bias)


@planted(LAB, "2.4", r"lacks the bias")
def row_without_bias(x, weight, bias, group):
    return f_bar(F.linear(x, weight), group)


@planted(LAB, "2.4", r"gradient of bias is 1/t .* divided among the ranks")
def row_with_a_divided_bias(x, weight, bias, group):
    return f_bar(F.linear(x, weight, bias / dist.get_world_size(group)), group)


@planted(LAB, "2.4", r"gradient of x is t times .* all-reduces again")
def row_by_torchs_differentiable_all_reduce(x, weight, bias, group):
    return differentiable.all_reduce(F.linear(x, weight), group=group) + bias


@planted(LAB, "2.4", r"averaged over the ranks")
def row_averages(x, weight, bias, group):
    return f_bar(F.linear(x, weight), group) / dist.get_world_size(group) + bias


@planted(LAB, "2.4", r"gradient of bias is t times")
def row_with_f_on_the_bias(x, weight, bias, group):
    return f_bar(F.linear(x, weight), group) + f(bias, group)


ON_RANK_0 = r"^the forward is right, but {} is used on rank 0 only: .* drift apart\. Add it on every rank, after the sum"


@planted(LAB, "2.4", ON_RANK_0.format("bias"))
def row_with_bias_on_rank_0(x, weight, bias, group):
    return f_bar(F.linear(x, weight, bias if dist.get_rank(group) == 0 else None), group)


@planted(LAB, "2.4", ON_RANK_0.format("bias"))
def row_with_bias_times_0_on_the_others(x, weight, bias, group):
    return f_bar(F.linear(x, weight, bias * (dist.get_rank(group) == 0)), group)


@planted(LAB, "2.6", ON_RANK_0.format("down_bias"))
def mlp_with_bias_on_rank_0(x, up_weight, up_bias, down_weight, down_bias, group):
    y = gelu(column_parallel_linear(x, up_weight, up_bias, group))
    return f_bar(F.linear(y, down_weight, down_bias if dist.get_rank(group) == 0 else None), group)


@planted(LAB, "2.5", r"cut into t blocks")
def split_by_blocks(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = rank_and_size(group)
    return qkv_weight.chunk(t)[rank], projection_weight.chunk(t, 1)[rank]


@planted(LAB, "2.5", r"projection is cut along its output features")
def split_projection_by_rows(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = rank_and_size(group)
    return torch.cat([part.chunk(t)[rank] for part in qkv_weight.chunk(3)]), projection_weight.chunk(t)[rank]


@planted(LAB, "2.5", r"cut along its input features")
def split_qkv_by_columns(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = rank_and_size(group)
    return qkv_weight.chunk(t, 1)[rank], projection_weight.chunk(t, 1)[rank]


@planted(LAB, "2.5", r"every rank takes heads 0, 1")
def split_forgets_the_rank(qkv_weight, projection_weight, num_attention_heads, group):
    _, t = rank_and_size(group)
    return torch.cat([part.chunk(t)[0] for part in qkv_weight.chunk(3)]), projection_weight.chunk(t, 1)[0]


@planted(LAB, "2.5", r"right rows in another order")
def split_head_by_head(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = rank_and_size(group)
    h = qkv_weight.shape[1]
    by_head = qkv_weight.view(3, num_attention_heads, -1, h).transpose(0, 1)  # [a, 3, d, h]
    return by_head.chunk(t)[rank].reshape(-1, h), projection_weight.chunk(t, 1)[rank]


@planted(LAB, "2.5", r"QKV rows of heads .* and the projection's columns of heads")
def split_takes_other_heads_for_the_projection(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = rank_and_size(group)
    return torch.cat([part.chunk(t)[rank] for part in qkv_weight.chunk(3)]), projection_weight.chunk(t, 1)[t - 1 - rank]


@planted(LAB, "2.5", r"heads are cut apart")
def split_inside_heads(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = rank_and_size(group)
    return torch.cat([part[rank::t] for part in qkv_weight.chunk(3)]), projection_weight[:, rank::t]


@planted(LAB, "2.6", r"down_bias t times")
def mlp_with_bias_on_every_rank(x, up_weight, up_bias, down_weight, down_bias, group):
    return f_bar(F.linear(gelu(column_parallel_linear(x, up_weight, up_bias, group)), down_weight, down_bias), group)


@planted(LAB, "2.6", r"own part only: x must enter through f")
def mlp_without_f(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(gelu(F.linear(x, up_weight, up_bias)), down_weight, down_bias, group)


@planted(LAB, "2.6", r"no gelu")
def mlp_without_gelu(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(column_parallel_linear(x, up_weight, up_bias, group), down_weight, down_bias, group)


@planted(LAB, "2.6", r"gelu comes after the sum")
def mlp_with_gelu_at_the_end(x, up_weight, up_bias, down_weight, down_bias, group):
    return gelu(row_parallel_linear(column_parallel_linear(x, up_weight, up_bias, group), down_weight, down_bias, group))


@planted(LAB, "2.6", r"gradient of up_weight is t times .* the sum at the end all-reduces")
def mlp_with_torchs_differentiable_all_reduce(x, up_weight, up_bias, down_weight, down_bias, group):
    y = gelu(column_parallel_linear(x, up_weight, up_bias, group))
    return differentiable.all_reduce(F.linear(y, down_weight), group=group) + down_bias


@planted(LAB, "2.7", r"own part only: x must enter through f")
def attention_without_f(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
    q, k, v = split_heads(F.linear(x, qkv_weight, qkv_bias), num_attention_heads // dist.get_world_size(group))
    return row_parallel_linear(merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight, projection_bias, group)


@planted(LAB, "2.7", r"projection must leave through f_bar")
def attention_without_f_bar(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
    q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), num_attention_heads // dist.get_world_size(group))
    return F.linear(merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight, projection_bias)


@planted(LAB, "2.7", r"split into a heads; it holds a/t")
def attention_with_all_heads_on_each_rank(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
    q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), num_attention_heads)
    return row_parallel_linear(merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight, projection_bias, group)


@planted(LAB, "2.8", r"own softmax")
def loss_of_its_own_softmax(logits, targets, group):
    target = f_bar(own_targets(logits, targets, group), group)
    return logits.logsumexp(-1) - target


@planted(LAB, "2.8", r"t times .* must not all-reduce")
def loss_with_torchs_differentiable_all_reduce(logits, targets, group):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = differentiable.all_reduce((logits - largest.unsqueeze(-1)).exp().sum(-1), group=group)
    return total.log() + largest - differentiable.all_reduce(own_targets(logits, targets, group), group=group)


@planted(LAB, "2.8", r"different largest logits")
def loss_with_a_largest_of_each_rank(logits, targets, group):
    largest = logits.detach().amax(-1)
    total = f_bar((logits - largest.unsqueeze(-1)).exp().sum(-1), group)
    return total.log() + largest - f_bar(own_targets(logits, targets, group), group)


@planted(LAB, "2.8", r"must add 0")
def loss_with_targets_of_every_rank(logits, targets, group):
    index = (targets - dist.get_rank(group) * logits.shape[-1]).clamp(0, logits.shape[-1] - 1)
    return log_sum(logits, group) - f_bar(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), group)


@planted(LAB, "2.8", r"target's logit is known only to the rank")
def loss_with_its_own_targets(logits, targets, group):
    return log_sum(logits, group) - own_targets(logits, targets, group)


@planted(LAB, "2.8", r"right for small logits.* subtract the largest")
def loss_that_overflows(logits, targets, group):
    return f_bar(logits.exp().sum(-1), group).log() - f_bar(own_targets(logits, targets, group), group)


@planted(LAB, "2.8", r"the logits themselves travel")
def loss_of_gathered_logits(logits, targets, group):
    rank, t = rank_and_size(group)
    parts = [torch.empty_like(logits) for _ in range(t)]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[rank] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@planted(LAB, "2.8", r"mean over all positions")
def loss_averaged(logits, targets, group):
    return (log_sum(logits, group) - f_bar(own_targets(logits, targets, group), group)).mean()


def own_targets(logits, targets, group):
    index = targets - dist.get_rank(group) * logits.shape[-1]
    mine = (index >= 0) & (index < logits.shape[-1])
    return logits.gather(-1, index.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) * mine


def log_sum(logits, group):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return f_bar((logits - largest.unsqueeze(-1)).exp().sum(-1), group).log() + largest
