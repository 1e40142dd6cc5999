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


@planted(LAB, "2.8", r"the logits themselves are sent")
def loss_of_gathered_logits(logits, targets, group):
    rank, t = rank_and_size(group)
    parts = [torch.empty_like(logits) for _ in range(t)]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[rank] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@planted(LAB, "2.8", r"mean over all positions")
def loss_averaged(logits, targets, group):
    return (log_sum(logits, group) - f_bar(own_targets(logits, targets, group), group)).mean()


@planted(LAB, "2.8", r"largest logit is subtracted and not added back")
def loss_without_the_largest(logits, targets, group):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return f_bar((logits - largest.unsqueeze(-1)).exp().sum(-1), group).log() - f_bar(
        own_targets(logits, targets, group), group
    )


def own_targets(logits, targets, group):
    index = targets - dist.get_rank(group) * logits.shape[-1]
    mine = (index >= 0) & (index < logits.shape[-1])
    return logits.gather(-1, index.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) * mine


def log_sum(logits, group):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return f_bar((logits - largest.unsqueeze(-1)).exp().sum(-1), group).log() + largest
