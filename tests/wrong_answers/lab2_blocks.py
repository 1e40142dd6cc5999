"""Wrong answers to lab 2: the cut, the MLP, attention."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from actmem_course.judge.solutions.lab2_tensor_parallel import column_parallel_linear, f_bar, row_parallel_linear
from actmem_course.pieces import gelu, merge_heads, split_heads
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


@planted(LAB, "2.6", r"down_bias is used on rank 0 only: .* Add it on every rank, after the sum")
def mlp_with_bias_on_rank_0(x, up_weight, up_bias, down_weight, down_bias, group):
    y = gelu(column_parallel_linear(x, up_weight, up_bias, group))
    return f_bar(F.linear(y, down_weight, down_bias if dist.get_rank(group) == 0 else None), group)


def attention_by(core):
    """Attention with another core."""

    def attention(x, qkv_weight, qkv_bias, projection_weight, projection_bias, num_attention_heads, group):
        heads = num_attention_heads // dist.get_world_size(group)
        q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), heads)
        return row_parallel_linear(merge_heads(core(q, k, v), x.shape[1]), projection_weight, projection_bias, group)

    return attention
