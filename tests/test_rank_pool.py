"""The ranks that stay alive for the whole test run: one that fails doesn't keep the others' test waiting."""

import pytest
import torch.distributed as dist

from tests import rank_pool


def place(added):
    return dist.get_rank() + added


def fails_on_rank_0():
    if dist.get_rank() == 0:
        raise ValueError("mine")
    dist.barrier()


def test_a_rank_that_waits_for_one_that_failed_is_ended(pools, monkeypatch):
    monkeypatch.setattr(rank_pool, "AFTER_A_FAILURE", 1)
    with pytest.raises(rank_pool.RankFailed, match=r"(?s)ValueError: mine\n\nrank 1 did not answer within 1 s"):
        pools[2].run(fails_on_rank_0)
    assert pools[2].run(place, 3) == [3, 4]
