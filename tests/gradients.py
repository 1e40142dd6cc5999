"""The gradients of a sharded module beside those of the unsharded one."""

from actmem.main_grad import gradient_of
from actmem.parallel.linear import shard
from actmem.parallel.weights import part_of


def gradient_pairs(module, whole, tp):
    """Of each parameter: its gradient, and this rank's part of that of ``whole``, a module or tensors by name."""
    whole = whole if isinstance(whole, dict) else dict(whole.named_parameters())
    return [
        (gradient_of(own), shard(whole[name].grad, getattr(own, "partition_dim", None), part_of(own, tp)))
        for name, own in module.named_parameters()
    ]


def part_of_state(whole, part):
    """Of the unsharded model ``whole`` the tensors that a pipeline stage, ``part``, holds its shards of."""
    return {name: whole.get_parameter(name).detach() for name, _ in part.named_parameters()}


def largest_difference(pairs):
    return max((one - other).abs().max().item() for one, other in pairs)
