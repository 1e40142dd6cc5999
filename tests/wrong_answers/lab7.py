"""Wrong answers to lab 7 that show on four ranks only: with two, the ranks that share a head are all of them."""

import torch.distributed as dist

from actmem_course.judge.solutions.lab7_todays_layer import split_grouped_heads
from tests.wrong_answers.planted import planted

LAB = "lab7_todays_layer"


@planted(LAB, "7.5", r"this rank has part \d \(rank % k\), and its query heads read part \d", size=4)
def heads_in_turn(q_weight, k_weight, v_weight, projection_weight, a, k, group):
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    q, _, _, projection = split_grouped_heads(q_weight, k_weight, v_weight, projection_weight, a, k, group)
    parts = min(t, k)
    return q, k_weight.chunk(parts)[rank % parts], v_weight.chunk(parts)[rank % parts], projection


def sums(choose):
    """Every rank's gradients of both weights, gathered; ``choose`` says which ranks' to add up."""

    def function(k_weight, v_weight, k, group):
        t, rank = dist.get_world_size(group), dist.get_rank(group)
        for weight in (k_weight, v_weight):
            parts = [weight.grad.clone() for _ in range(t)]
            dist.all_gather(parts, weight.grad, group=group)
            weight.grad.copy_(sum(parts[other] for other in choose(t, rank, k)))

    return function


@planted(
    LAB,
    "7.6",
    r"is the sum of the ranks. parts; it should be the sum of those of ranks \d to \d: .* share a key head",
    size=4,
)
def sums_over_all_ranks(*arguments):
    sums(lambda t, rank, k: [rank] if t <= k else range(t))(*arguments)


@planted(LAB, "7.6", r"over the ranks rank % k, rank % k \+ k, .*; neighbours share a head", size=4)
def sums_over_ranks_in_turn(*arguments):
    sums(lambda t, rank, k: [rank] if t <= k else range(rank % k, t, k))(*arguments)


@planted(LAB, "7.6", r"is rank \d's part; it should be the sum of those", size=4)
def takes_the_first_part(*arguments):
    sums(lambda t, rank, k: [rank] if t <= k else [rank * k // t * (t // k)])(*arguments)


@planted(
    LAB,
    "7.6",
    r"is t .here 4. times the sum of the ranks. parts; it should be the sum of those of ranks 0 to 3",
    size=4,
)
def counts_each_twice(*arguments):
    def twice(t, rank, k):
        first = rank * k // t * (t // k) if t > k else rank
        return [rank] if t <= k else [*range(first, first + t // k)] * (t // k)

    sums(twice)(*arguments)
