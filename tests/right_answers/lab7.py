"""Right answers to lab 7: torch's checkpoint, heads by their numbers, another collective."""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.right_answers.register import right


def written_out(x, weight, eps):
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@right("7.2")
def norm_that_keeps_its_input_alone(x, weight, eps):
    return checkpoint(written_out, x, weight, eps, use_reentrant=False)


@right("7.4")
def heads_by_their_numbers(q_weight, k_weight, v_weight, projection_weight, a, k, group):
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    d = len(q_weight) // a
    queries = torch.arange(rank * a // t, (rank + 1) * a // t)
    read = torch.unique(queries * k // a)
    rows = lambda heads: (heads[:, None] * d + torch.arange(d)).flatten()  # noqa: E731
    own = rows(queries)
    return q_weight[own], k_weight[rows(read)], v_weight[rows(read)], projection_weight[:, own]


@right("7.5")
def sums_of_gathered_parts(k_weight, v_weight, k, group):
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    both = torch.stack([k_weight.grad, v_weight.grad])
    parts = [torch.empty_like(both) for _ in range(t)]
    dist.all_gather(parts, both, group=group)
    same = [part for other, part in enumerate(parts) if other * k // t == rank * k // t] if t > k else [both]
    k_weight.grad, v_weight.grad = torch.stack(same).sum(0).unbind()
