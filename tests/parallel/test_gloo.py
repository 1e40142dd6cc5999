"""Reduce-scatter over gloo: the sum of torch's own, seen as one reduce-scatter, in half the bytes."""

import importlib

import pytest
import torch
import torch.distributed as dist

from actmem.config import ConfigError
from actmem.ledger.comms import Collective, count_collectives
from actmem.parallel import collectives
from actmem.parallel.groups import TensorParallel, tensor_parallel


def both(dtype):
    """Ours and torch's on whole numbers, whose sums are exact in any order; what was counted; whether x stayed as it was."""
    t, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (3 * t, 2, 5), generator=generator).to(dtype).transpose(1, 2)  # not contiguous
    before = x.clone()
    with count_collectives() as seen:
        ours = collectives.reduce_scatter(x, tensor_parallel())
    torchs = torch.empty_like(ours)
    collectives.torch_reduce_scatter(torchs, x.contiguous())
    return torch.equal(ours, torchs), ours.dtype == dtype, torch.equal(x, before), seen.collectives


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_same_sum_counted_as_one_reduce_scatter(size, dtype, pools):
    payload = 3 * size * 2 * 5 * dtype.itemsize
    for found in pools[size].run(both, dtype):
        assert found == (True, True, True, [Collective("reduce-scatter", payload)])


def test_modules_can_be_loaded_again():
    for name in ("torch_private", "parallel.collectives"):
        importlib.reload(importlib.import_module(f"actmem.{name}"))  # an operator is defined once a process


def small_cases():
    tp, x = tensor_parallel(), torch.ones(4, 3, requires_grad=True)
    pending = collectives.start_reduce_scatter(x, tp)
    assert pending.wait() is pending.wait()  # it adds up once
    assert not any(
        one(x, tp).requires_grad for one in (collectives.reduce_scatter, collectives.all_gather, collectives.all_reduce)
    )
    with pytest.raises(ValueError, match=r"dimension 0 of \(3, 2\) must be divisible by the 2 ranks"):
        collectives.reduce_scatter(torch.ones(3, 2), tp)
    everyone = TensorParallel(None, 2, tp.rank)
    assert torch.equal(collectives.reduce_scatter(x, everyone), collectives.reduce_scatter(x, tp))
    for rank in range(2):
        group = dist.new_group([rank])
        if rank != tp.rank:
            with pytest.raises(ConfigError, match=f"^group: rank {tp.rank} is not in it$"):
                tensor_parallel(group)
    kept, given = torch.ones(3, 2), torch.ones(3, 2)
    result = collectives.start_all_reduce(given, tp, in_place=True).wait()
    collectives.start_all_reduce(kept, tp).wait()
    assert result.data_ptr() == given.data_ptr() and given[0, 0] == 2 and kept[0, 0] == 1


def test_results_are_added_up_once_outside_any_graph_and_in_place_only_if_asked(pools):
    pools[2].run(small_cases)


def in_lists():
    """What is counted of torch's collectives that take the parts of a tensor as a list, in a group of ranks 0 and 1."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    x = torch.ones(6, 5)
    with count_collectives() as seen:
        dist.all_gather([torch.empty_like(x) for _ in range(2)], x, group=group)
        dist.reduce_scatter(torch.empty(3, 5), list(x.chunk(2)), group=group)
    return seen.collectives


@pytest.mark.parametrize("size", [2, 4])
def test_a_list_of_parts_is_the_whole_tensor(size, pools):
    wanted = [Collective("all-gather", 2 * 6 * 5 * 4), Collective("reduce-scatter", 6 * 5 * 4)]
    assert pools[size].run(in_lists) == [wanted, wanted, *[None] * (size - 2)]
