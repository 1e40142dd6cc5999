"""Wrong answers to lab 2: the cut, the MLP, attention."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F

from actmem_course.judge.solutions.lab2_tensor_parallel import column_parallel_linear, f, f_bar, row_parallel_linear
from actmem_course.pieces import core_attention, gelu, merge_heads, split_heads
from tests.wrong_answers.planted import planted

LAB = "lab2_tensor_parallel"


def rank_and_size(group):
    return dist.get_rank(group), dist.get_world_size(group)


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


@planted(LAB, "2.6", r"down_bias comes before f_bar: it belongs after the sum over the ranks, once")
def mlp_with_bias_on_every_rank(x, up_weight, up_bias, down_weight, down_bias, group):
    return f_bar(F.linear(gelu(column_parallel_linear(x, up_weight, up_bias, group)), down_weight, down_bias), group)


@planted(LAB, "2.6", r"down_bias is used on rank 0 only: .* Add it on every rank, after the sum")
def mlp_with_bias_on_rank_0(x, up_weight, up_bias, down_weight, down_bias, group):
    y = gelu(column_parallel_linear(x, up_weight, up_bias, group))
    return f_bar(F.linear(y, down_weight, down_bias if dist.get_rank(group) == 0 else None), group)


@planted(LAB, "2.6", r"the gradients are not: f is missing: it belongs at the entry, once")
def mlp_without_f(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(gelu(F.linear(x, up_weight, up_bias)), down_weight, down_bias, group)


@planted(LAB, "2.6", r"the gelu is missing: it belongs between the two linears")
def mlp_without_gelu(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(column_parallel_linear(x, up_weight, up_bias, group), down_weight, down_bias, group)


@planted(LAB, "2.6", r"the gelu comes after down_bias: it belongs between the two linears")
def mlp_with_gelu_at_the_end(x, up_weight, up_bias, down_weight, down_bias, group):
    return gelu(
        row_parallel_linear(column_parallel_linear(x, up_weight, up_bias, group), down_weight, down_bias, group)
    )


@planted(LAB, "2.6", r"the gradients are not: f_bar gives in backward (the sum|t .* times) .* without an all-reduce")
def mlp_with_torchs_differentiable_all_reduce(x, up_weight, up_bias, down_weight, down_bias, group):
    y = gelu(column_parallel_linear(x, up_weight, up_bias, group))
    return differentiable.all_reduce(F.linear(y, down_weight), group=group) + down_bias


@planted(LAB, "2.6", r'F\.gelu is called without approximate="tanh"')
def mlp_with_the_exact_gelu(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(
        F.gelu(column_parallel_linear(x, up_weight, up_bias, group)), down_weight, down_bias, group
    )


@planted(LAB, "2.6", r"relu is used instead of gelu")
def mlp_with_relu(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(
        F.relu(column_parallel_linear(x, up_weight, up_bias, group)), down_weight, down_bias, group
    )


@planted(LAB, "2.6", r"up_bias is missing")
def mlp_without_up_bias(x, up_weight, up_bias, down_weight, down_bias, group):
    return row_parallel_linear(gelu(F.linear(f(x, group), up_weight)), down_weight, down_bias, group)


@planted(LAB, "2.6", r"down_bias is missing")
def mlp_without_down_bias(x, up_weight, up_bias, down_weight, down_bias, group):
    return f_bar(F.linear(gelu(column_parallel_linear(x, up_weight, up_bias, group)), down_weight), group)


@planted(LAB, "2.6", r"x is added to the result")
def mlp_that_adds_x(x, up_weight, up_bias, down_weight, down_bias, group):
    return x + row_parallel_linear(
        gelu(column_parallel_linear(x, up_weight, up_bias, group)), down_weight, down_bias, group
    )


@planted(LAB, "2.7", r"the gradients are not: f is missing: it belongs at the entry, once")
def attention_without_f(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
    q, k, v = split_heads(F.linear(x, qkv_weight, qkv_bias), num_attention_heads // dist.get_world_size(group))
    return row_parallel_linear(
        merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight, projection_bias, group
    )


@planted(LAB, "2.7", r"f_bar is missing: it belongs right after the row-parallel product")
def attention_without_f_bar(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
    q, k, v = split_heads(
        column_parallel_linear(x, qkv_weight, qkv_bias, group), num_attention_heads // dist.get_world_size(group)
    )
    return F.linear(merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight, projection_bias)


@planted(LAB, "2.7", r"split into a heads; it holds a/t")
def attention_with_all_heads_on_each_rank(
    x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group
):
    q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), num_attention_heads)
    return row_parallel_linear(
        merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight, projection_bias, group
    )


def attention_by(core):
    """Attention with another core."""

    def attention(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
        heads = num_attention_heads // dist.get_world_size(group)
        q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), heads)
        return row_parallel_linear(merge_heads(core(q, k, v), x.shape[1]), projection_weight, projection_bias, group)

    return attention


@planted(LAB, "2.7", r"no causal mask")
def attention_to_later_tokens(x, *arguments):
    return attention_by(F.scaled_dot_product_attention)(x, *arguments)


@planted(LAB, "2.7", r"Q and K are swapped")
def attention_with_q_and_k_exchanged(x, *arguments):
    return attention_by(lambda q, k, v: core_attention(k, q, v))(x, *arguments)


@planted(LAB, "2.7", r"K and V are swapped")
def attention_with_k_and_v_exchanged(x, *arguments):
    return attention_by(lambda q, k, v: core_attention(q, v, k))(x, *arguments)


@planted(LAB, "2.7", r"scores are not divided by the root of the head size")
def attention_without_the_root(x, *arguments):
    return attention_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))(
        x, *arguments
    )
