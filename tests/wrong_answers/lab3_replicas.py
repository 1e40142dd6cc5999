"""Wrong answers to lab 3: partial gradients, dropout streams."""

import torch
import torch.distributed as dist

from tests.wrong_answers.planted import planted

LAB = "lab3_sequence_parallel"

PARTIAL = ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias")


def all_reduce_gradients(w, names, group):
    for name in names:
        dist.all_reduce(getattr(w, name).grad, group=group)


@planted(LAB, "3.6", r"parameters themselves are changed \(norm1_weight")
def sums_parameters(w, group):
    for name in PARTIAL:
        dist.all_reduce(getattr(w, name).data, group=group)


@planted(LAB, "3.6", r"each rank sends [\d,]+ B where (576|1,728) B are enough")
def sums_all_gradients_and_puts_some_back(w, group):
    before = {name: tensor.grad.clone() for name, tensor in w.named().items() if name not in PARTIAL}
    all_reduce_gradients(w, w.named(), group)
    for name, gradient in before.items():
        getattr(w, name).grad.copy_(gradient)


def generators(core_seed, block_seed, device):
    core, block = torch.Generator(device), torch.Generator(device)
    core.manual_seed(core_seed)
    block.manual_seed(block_seed)
    return core, block


@planted(LAB, "3.7", r"ranks draw the same for core")
def one_seed_for_all(seed, sequence_parallel, device, group):
    return generators(seed, seed + 1, device)


@planted(LAB, "3.7", r"without sequence_parallel, ranks draw different numbers for block")
def another_seed_for_each_rank_everywhere(seed, sequence_parallel, device, group):
    rank = dist.get_rank(group)
    return generators(seed + 10 * rank + 1, seed + 10 * rank, device)


@planted(LAB, "3.7", r"with sequence_parallel, ranks draw the same for block")
def block_alike_under_sequence_parallelism(seed, sequence_parallel, device, group):
    return generators(seed + 1 + dist.get_rank(group), seed, device)


@planted(LAB, "3.7", r"core and block draw the same numbers on some ranks")
def rank_0_has_one_stream_twice(seed, sequence_parallel, device, group):
    rank = dist.get_rank(group)
    return generators(seed + rank, seed + 100 + rank if sequence_parallel else seed, device)


@planted(LAB, "3.7", r"default generator is changed")
def seeds_the_default_generator(seed, sequence_parallel, device, group):
    torch.manual_seed(seed + dist.get_rank(group))
    return generators(seed + 1 + dist.get_rank(group), seed, device)


@planted(LAB, "3.7", r"another seed gives the same numbers")
def ignores_the_seed(seed, sequence_parallel, device, group):
    rank = dist.get_rank(group)
    return generators(rank + 1, 100 + rank if sequence_parallel else 0, device)


@planted(LAB, "3.7", r"same seed gives other numbers the second time")
def seeds_from_the_clock(seed, sequence_parallel, device, group):
    core, block = torch.Generator(device), torch.Generator(device)
    core.seed()
    block.seed()
    return core, block


@planted(
    LAB,
    "3.6",
    r"not part of group.* A source or destination counts among all ranks: dist\.get_global_rank\(group, 0\)",
    size=2,
)
def sums_on_global_rank_0(w, group):
    for name in PARTIAL:
        dist.reduce(getattr(w, name).grad, 0, group=group)
        dist.broadcast(getattr(w, name).grad, 0, group=group)
