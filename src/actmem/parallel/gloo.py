"""Reduce-scatter on CPUs, where gloo has none.

torch's reduce-scatter over gloo is an all-reduce of the whole tensor that forgets the other
ranks' parts: twice the bytes, and more than twice the time.  Here every rank sends each other
rank the part which that one keeps, and sums what arrives: (t-1)/t of the tensor from each rank,
as around a ring.

It is one operator of torch's dispatcher, ``actmem::reduce_scatter``, so that whoever counts
collectives there finds a reduce-scatter and not the all-to-all inside.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, library

_LIBRARY = library.Library("actmem", "DEF")
_LIBRARY.define("reduce_scatter(Tensor x, int ranks, str group_name) -> Tensor")


def _exchange(x: Tensor, ranks: int, group_name: str) -> Tensor:
    each = [x.shape[0] // ranks] * ranks
    return torch.ops._c10d_functional.all_to_all_single(x, each, each, group_name)


_LIBRARY.impl("reduce_scatter", _exchange, "CompositeExplicitAutograd")


class PartsUnderWay:
    """The ranks' parts of this rank's sum, on their way.  ``wait()`` adds them up."""

    def __init__(self, parts: Tensor, ranks: int):
        self._parts: Tensor | None = parts
        self._ranks = ranks
        self._sum: Tensor | None = None

    def wait(self) -> Tensor:
        """The sum: ``[s/t, …]``; added up once, however often it is waited for."""
        if self._sum is None:
            parts = torch.ops._c10d_functional.wait_tensor(self._parts)
            self._parts, self._sum = None, parts.unflatten(0, (self._ranks, -1)).sum(0)
        return self._sum


def start_exchange(x: Tensor, group: dist.ProcessGroup) -> PartsUnderWay:
    """Begin a reduce-scatter along dimension 0 of ``x``, which is contiguous and on a CPU."""
    ranks = dist.get_world_size(group)
    return PartsUnderWay(torch.ops.actmem.reduce_scatter(x, ranks, group.group_name), ranks)
