"""All-to-all along dimension 0, by which experts and context parallelism send tokens to other ranks."""

import torch.distributed as dist
from torch import Tensor

from actmem.parallel.groups import TensorParallel


def all_to_all(
    x: Tensor, tp: TensorParallel, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Send each rank its part of ``x``, and return the parts that all ranks sent to this one.

    Args:
        x: ``[rows, …]``, first the rows for rank 0, then those for rank 1, and so on.
        tp: the ranks that take part; each must call this function.
        received: how many rows each rank sends to this one; None: all parts are equal.
        sent: how many rows this rank sends to each rank; None: all parts are equal.

    Returns: ``[rows, …]``, first the rows from rank 0, then those from rank 1, and so on; with one rank, ``x`` itself.
    """
    if tp.size == 1:
        return x
    result = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=tp.group)
    return result
