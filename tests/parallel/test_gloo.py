"""Reduce-scatter over gloo: the sum of torch's own, seen as one reduce-scatter, in half the bytes."""

import importlib

import pytest
import torch
import torch.distributed as dist

from actmem.measure.comms import Collective, count_collectives
from actmem.parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_reduce_scatter,
    torch_reduce_scatter,
)
from actmem.parallel.groups import tensor_parallel


def both(dtype):
    """Ours and torch's on whole numbers, whose sums are exact in any order; what was counted; whether x stayed as it was."""
    t, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (3 * t, 2, 5), generator=generator).to(dtype).transpose(1, 2)  # not contiguous
    before = x.clone()
    with count_collectives() as seen:
        ours = reduce_scatter(x, tensor_parallel())
    torchs = torch.empty_like(ours)
    torch_reduce_scatter(torchs, x.contiguous())
    return torch.equal(ours, torchs), ours.dtype == dtype, torch.equal(x, before), seen.collectives


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_sum_counted_as_one_reduce_scatter(size, dtype, pools):
    payload = 3 * size * 2 * 5 * dtype.itemsize
    for found in pools[size].run(both, dtype):
        assert found == (True, True, True, [Collective("reduce-scatter", payload)])


def test_the_module_can_be_loaded_again():
    importlib.reload(importlib.import_module("actmem.parallel.collectives"))  # an operator is defined once a process


def waited_for_twice():
    pending = start_reduce_scatter(torch.ones(4, 3), tensor_parallel())
    return pending.wait() is pending.wait()


def test_waiting_twice_adds_up_once(pools):
    assert all(pools[2].run(waited_for_twice))


def outside_a_graph():
    x, tp = torch.ones(4, 3, requires_grad=True), tensor_parallel()
    return [one(x, tp).requires_grad for one in (reduce_scatter, all_gather, all_reduce)]


def test_no_result_is_part_of_a_graph(pools):
    assert pools[2].run(outside_a_graph) == [[False] * 3] * 2


def uneven():
    with pytest.raises(ValueError, match=r"dimension 0 of \(3, 2\) must be divisible by the 2 ranks"):
        reduce_scatter(torch.ones(3, 2), tensor_parallel())
    return True


def test_uneven_parts_are_refused(pools):
    assert all(pools[2].run(uneven))
