"""All-reduce (sum and maximum), and all-gather and reduce-scatter along dimension 0.

Dimension 0 is the sequence (activations are ``[s, b, h]``), so no collective needs a transpose before or after it. A
collective writes to the caller's tensor only if told to (``in_place``). With one rank it returns its input itself, with
its autograd graph; with more ranks it returns a new tensor without a graph. So these collectives are not
differentiable; ``conjugates`` has those that are. Where a matmul can overlap a collective there are two forms:
``start_…`` returns at once, the plain form waits.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.parallel.groups import TensorParallel
from actmem.torch_private import start_sending_parts, wait_for

# torch 2.13 renamed these two; the older names do the same.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective in progress. ``wait()`` returns its result; on CUDA only the stream waits.

    Args:
        result: the tensor into which the collective writes.
        work: torch's handle of the collective; None if there is nothing to wait for.
        parts: if more than 1, ``result`` holds the parts from this many ranks, one after the other along dimension 0,
            and ``wait`` returns their sum.
    """

    def __init__(self, result: Tensor, work: dist.Work | None = None, parts: int = 1):
        self._result, self._work, self._parts = result, work, parts

    def wait(self) -> Tensor:
        """Return the result, complete once the current stream reaches this point. Further calls return it again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._parts > 1:
            parts = wait_for(self._result).unflatten(0, (self._parts, -1))
            self._result, self._parts = parts.sum(0, dtype=parts.dtype), 1
        return self._result


def start_all_reduce(x: Tensor, tp: TensorParallel, *, in_place: bool = False, by=dist.ReduceOp.SUM) -> Pending:
    """Start to sum ``x`` over the ranks: any shape in, the same shape out.

    Args:
        x: this rank's summand.
        tp: the ranks over which to sum.
        in_place: write the sum into ``x`` if it is contiguous, which saves a copy if nobody else reads ``x``.
        by: the reduction; ``ReduceOp.MAX`` gives the maximum in place of the sum.

    Returns: a Pending; its ``wait()`` returns the sum.
    """
    if tp.size == 1:
        return Pending(x)
    result = x.detach().contiguous() if in_place else x.detach().clone(memory_format=torch.contiguous_format)
    return Pending(result, dist.all_reduce(result, by, group=tp.group, async_op=True))


def all_reduce_max(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the element-wise maximum of ``x`` over the ranks of ``tp``: any shape in, the same shape out."""
    return start_all_reduce(x, tp, by=dist.ReduceOp.MAX).wait()


def start_all_gather(x: Tensor, tp: TensorParallel) -> Pending:
    """Start to join the ranks' shards along dimension 0: ``[s/t, …]`` in, ``[s, …]`` out.

    Args:
        x: this rank's shard.
        tp: the ranks that take part.

    Returns: a Pending; its ``wait()`` returns the joined tensor.
    """
    if tp.size == 1:
        return Pending(x)
    result = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    return Pending(result, torch_all_gather(result, x.detach().contiguous(), group=tp.group, async_op=True))


def start_reduce_scatter(x: Tensor, tp: TensorParallel) -> Pending:
    """Start to sum over the ranks and keep this rank's part: ``[s, …]`` in, ``[s/t, …]`` out.

    Over gloo, torch's reduce-scatter is an all-reduce of the whole tensor that discards the other ranks' parts: twice
    the bytes, and more than twice the time. Here each rank sends to every other rank the part that this other rank
    keeps, and sums the parts that arrive. Each rank sends (t-1)/t of its tensor, as around a ring. All of it is one
    operator of torch's dispatcher, so a tool that counts collectives there counts one reduce-scatter.

    Args:
        x: this rank's summand; dimension 0 is split among the ranks.
        tp: the ranks that take part.

    Returns: a Pending; its ``wait()`` returns this rank's part of the sum.
    Raises: ValueError if t does not divide dimension 0.
    """
    if tp.size == 1:
        return Pending(x)
    if x.shape[0] % tp.size:
        raise ValueError(f"dimension 0 of {tuple(x.shape)} must be divisible by the {tp.size} ranks")
    if x.device.type == "cpu" and dist.get_backend(tp.group) == "gloo":
        group = tp.group or dist.group.WORLD
        parts = start_sending_parts(x.detach().contiguous(), tp.size, group.group_name)  # type: ignore[union-attr]
        return Pending(parts, parts=tp.size)
    result = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return Pending(result, torch_reduce_scatter(result, x.detach().contiguous(), group=tp.group, async_op=True))


def all_reduce(x: Tensor, tp: TensorParallel, *, in_place: bool = False) -> Tensor:
    """Return the sum of ``x`` over the ranks: any shape in, the same shape out.

    Args:
        x: this rank's summand.
        tp: the ranks over which to sum.
        in_place: write the sum into ``x``, whatever its strides, and return ``x``.
    """
    result = start_all_reduce(x, tp, in_place=in_place).wait()
    if not in_place:
        return result
    return x if x.is_contiguous() else x.copy_(result)


def all_gather(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the shards ``x`` of all ranks of ``tp``, joined along dimension 0: ``[s/t, …]`` in, ``[s, …]`` out."""
    return start_all_gather(x, tp).wait()


def reduce_scatter(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's part, along dimension 0, of the sum of ``x`` over the ranks of ``tp``.

    ``[s, …]`` in, ``[s/t, …]`` out.
    """
    return start_reduce_scatter(x, tp).wait()
