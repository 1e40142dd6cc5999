"""All-to-all along dimension 0: experts and context parallelism send tokens with it."""

import torch.distributed as dist
from torch import Tensor

from actmem.parallel.groups import TensorParallel


def all_to_all(
    x: Tensor, tp: TensorParallel, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Send each rank its part of ``x`` and return what all ranks sent to this one.

    Args:
        x: rows grouped by receiver along dimension 0.
        received: how many rows each rank sends to this one; None: all parts are equal.
        sent: how many rows this rank sends to each rank; None: all parts are equal.

    Returns: rows grouped by sender; with one rank, ``x`` itself.
    """
    if tp.size == 1:
        return x
    result = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=tp.group)
    return result
