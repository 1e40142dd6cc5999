"""All-to-all along dimension 0: experts and context parallelism send tokens with it."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from actmem.parallel.groups import TensorParallel


def all_to_all(
    x: Tensor, tp: TensorParallel, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Input rows are grouped by receiver, output rows by sender.  Without sizes every part is equal."""
    if tp.size == 1:
        return x
    result = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=tp.group)
    return result
