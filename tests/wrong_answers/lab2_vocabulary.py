"""Wrong answers to lab 2: the loss."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F

from actmem_course.judge.solutions.lab2_tensor_parallel import f_bar
from tests.wrong_answers.planted import planted

LAB = "lab2_tensor_parallel"


def rank_and_size(group):
    return dist.get_rank(group), dist.get_world_size(group)


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


@planted(LAB, "2.8", r"must add 0")
def loss_with_targets_of_every_rank(logits, targets, group):
    index = (targets - dist.get_rank(group) * logits.shape[-1]).clamp(0, logits.shape[-1] - 1)
    return log_sum(logits, group) - f_bar(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1), group)


@planted(LAB, "2.8", r"the logits themselves are sent")
def loss_of_gathered_logits(logits, targets, group):
    rank, t = rank_and_size(group)
    parts = [torch.empty_like(logits) for _ in range(t)]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[rank] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def own_targets(logits, targets, group):
    index = targets - dist.get_rank(group) * logits.shape[-1]
    mine = (index >= 0) & (index < logits.shape[-1])
    return logits.gather(-1, index.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) * mine


def log_sum(logits, group):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return f_bar((logits - largest.unsqueeze(-1)).exp().sum(-1), group).log() + largest
