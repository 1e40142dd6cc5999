"""One process as one rank of many: real tensors when asked for, and no unwritten memory among them."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from actmem.config import ConfigError
from actmem.ledger.comms import Collective, count_collectives, kind_of
from actmem.ledger.emulate import emulated_rank
from actmem.parallel import collectives
from actmem.parallel.groups import tensor_parallel
from actmem_tools import no_device


def test_tensors_are_fake_unless_real_ones_are_asked_for():
    with emulated_rank(4, rank=3):
        assert dist.get_backend() == "fake" and dist.get_rank() == 3 and isinstance(torch.zeros(2), FakeTensor)
    with emulated_rank(4, real_tensors=True):
        assert dist.get_backend() == "fake" and not isinstance(torch.zeros(2), FakeTensor)
    assert not dist.is_initialized()


@pytest.mark.parametrize("writes", [True, False])
def test_reduce_scatter_gives_this_ranks_part_on_every_torch(monkeypatch, writes):
    if not writes:  # as the fake backend was before torch 2.13
        monkeypatch.setattr(collectives, "torch_reduce_scatter", lambda result, x, **_: None)
    with emulated_rank(2, rank=1, real_tensors=True):
        part = collectives.start_reduce_scatter(torch.arange(4.0), tensor_parallel()).wait()
        assert part.tolist() == [2, 3]
        assert collectives.all_gather(part, tensor_parallel()).tolist() == [2, 3, 2, 3]


def test_dtensors_all_to_all_and_an_all_reduce_of_several_in_place_are_counted():
    assert kind_of(torch.ops._dtensor.shard_dim_alltoall.default) == "all-to-all"
    with emulated_rank(2, real_tensors=True), count_collectives() as seen:
        group = torch.distributed.group.WORLD.group_name
        for sent in torch.ops._c10d_functional.all_reduce_coalesced_([torch.ones(2), torch.ones(3)], "sum", group):
            torch.ops._c10d_functional.wait_tensor(sent)
    assert seen.collectives == [Collective("all-reduce", 20)]


def test_a_gpu_with_its_number_is_a_gpu_and_no_other_word_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda", "cuda:1"):
        with emulated_rank(2, device=device):
            assert not isinstance(torch.zeros(2), FakeTensor)
    for device in ("banana", "cuda:", "cuda:first", "meta"):
        rule = f"^device: must be cpu, cuda or .*, got '{device}'$"
        with pytest.raises(ConfigError, match=rule), emulated_rank(2, device=device):
            pass


def test_a_second_world_is_refused():
    with emulated_rank(2), pytest.raises(ConfigError, match="already a rank"), emulated_rank(2):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rows", "columns", "of_each"), [(8, 5, 8), (5, 5, 8), (5, 8, 8)])
def test_a_mask_is_kept_with_rows_that_the_memory_efficient_kernel_can_read(rows, columns, of_each):
    query, key = torch.zeros(2, 4, rows, 16), torch.zeros(2, 4, columns, 16)
    mask = torch.ones(2, 1, rows, columns, dtype=torch.bool)
    kept = no_device._bias(mask, query, key, "memory-efficient")
    assert kept.shape == (2, 4, rows, columns) and not kept.any()
    assert kept.stride()[:3] == (rows * of_each, 0, of_each)
    assert kept.untyped_storage().nbytes() == 2 * rows * of_each * 4
