"""Reduce-scatter on CPUs, where gloo has none.

Over gloo, torch's reduce-scatter is an all-reduce of the whole tensor that discards the other ranks' parts: twice the
bytes, and more than twice the time. Here each rank sends every other rank the part that it keeps, and sums what
arrives: (t-1)/t of the tensor from each rank, as around a ring.

It is one operator of torch's dispatcher, ``actmem::reduce_scatter``, so that a tool that counts collectives there
sees a reduce-scatter and not the all-to-all inside.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, library

from actmem.torch_private import start_all_to_all, wait_for


def _exchange(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return start_all_to_all(x, [x.shape[0] // ranks] * ranks, group_name)


if not hasattr(torch.ops.actmem, "reduce_scatter"):  # once a process, also when this file is loaded again
    library.define("actmem::reduce_scatter", "(Tensor x, int ranks, str group_name) -> Tensor")
    # Looks the function up at each call, so that an edit counts after a reload.
    library.impl("actmem::reduce_scatter", "default", lambda *arguments: sys.modules[__name__]._exchange(*arguments))


class PartsUnderWay:
    """A reduce-scatter under way: the ranks' parts of this rank's sum.  ``wait()`` adds them up."""

    def __init__(self, parts: Tensor, ranks: int):
        self._parts: Tensor | None = parts  # until the sum is there
        self._ranks = ranks
        self._sum: Tensor | None = None

    def wait(self) -> Tensor:
        """The sum: ``[s/t, …]``; computed once, however often ``wait`` is called."""
        if self._parts is not None:
            parts = wait_for(self._parts)
            self._parts, self._sum = None, parts.unflatten(0, (self._ranks, -1)).sum(0)
        assert self._sum is not None
        return self._sum


def start_exchange(x: Tensor, group: dist.ProcessGroup | None) -> PartsUnderWay:
    """Begin a reduce-scatter along dimension 0 of ``x``, which is contiguous and on a CPU."""
    assert group is not None
    ranks = dist.get_world_size(group)
    return PartsUnderWay(torch.ops.actmem.reduce_scatter(x, ranks, group.group_name), ranks)
