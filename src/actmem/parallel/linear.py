"""The two linears of tensor parallelism, and the gradients that sequence parallelism leaves partial.

Column and row speak of A in Y = XA.  torch stores Aᵀ, ``[out, in]``, so a column-parallel
weight is cut along dimension 0 of ``weight`` and a row-parallel one along dimension 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.parallel.collectives import all_gather, all_reduce, start_all_gather, start_all_reduce
from actmem.parallel.collectives import start_reduce_scatter
from actmem.parallel.conjugates import f, f_bar, g, g_bar
from actmem.parallel.groups import TensorParallel


class ColumnParallelLinear(nn.Module):
    """Y = XA + bias with A cut by columns: this rank makes ``out_features / t`` of Y.

    In: ``[s, b, in]`` replicated, or ``[s/t, b, in]`` under sequence parallelism.
    Out: ``[s, b, out/t]``.  Keeps its input as given, e·sb·in bytes or 1/t of that; the
    plain form (``keep_gathered_input``) keeps the gathered input, e·sb·in.
    Source: 2205.05198 section 4.2, figures 4 to 6.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, **factory):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features // tp.size, in_features, **factory))
        self.bias = nn.Parameter(torch.zeros(out_features // tp.size, **factory))
        self.weight.partition_dim = self.bias.partition_dim = 0
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self.weight, self.bias, self.tp)


def column_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """The product behind ColumnParallelLinear, for a weight that lives elsewhere."""
    if tp.keep_gathered_input:
        enter = g if tp.sequence_parallel else f
        return F.linear(enter(x, tp), weight, bias)
    return _GatherInBackward.apply(x, weight, bias, tp)


class RowParallelLinear(nn.Module):
    """Y = XA with A cut by rows: each rank's product is a partial sum, added up on the way out.

    In: ``[s, b, in/t]``.  Out: ``[s, b, out]``, or ``[s/t, b, out]`` under sequence
    parallelism.  The bias is added once, after the sum.  Keeps its input, e·sb·in/t bytes.
    Source: 2205.05198 section 4.2, figures 4 to 6.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, **factory):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp.size, **factory))
        self.weight.partition_dim = 1
        self.bias = nn.Parameter(torch.zeros(out_features, **factory))
        mark_partial_gradient(self.bias, tp)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        leave = g_bar if self.tp.sequence_parallel else f_bar
        partial = F.linear(x, self.weight)  # [s, b, out] partial over t
        return leave(partial, self.tp) + self.bias


class _GatherInBackward(Function):
    """f or g, and the linear behind it, as one step that keeps the input as it came.

    The gathered input is only needed for the weight gradient, so under sequence parallelism
    each rank keeps its shard and gathers again in backward.  Both exchanges of backward
    run beside a matrix product that does not need them: the gather beside the gradient of
    the input, the reduction of that gradient beside the gradient of the weight.
    (On CUDA the second order holds only if the exchange is queued before the product, as
    it is here; CUDA_DEVICE_MAX_CONNECTIONS=1 keeps the hardware from reordering them.)
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x, weight)
        full = all_gather(x, tp) if tp.sequence_parallel else x  # [s, b, in]
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        tp: TensorParallel = ctx.tp
        # Under autocast the product ran in another dtype than the tensors that came in.
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gather = start_all_gather(x, tp) if tp.sequence_parallel and needs_weight else None

        grad_x = grad_weight = grad_bias = reduction = None
        if needs_x:
            partial = grad @ weight  # [s, b, in] partial over t
            start = start_reduce_scatter if tp.sequence_parallel else start_all_reduce
            full = gather.wait() if gather else x
            reduction = start(partial, tp)
        else:
            full = gather.wait() if gather else x
        rows = grad.flatten(0, -2)  # [sb, out/t]
        if needs_weight:
            grad_weight = rows.t() @ full.flatten(0, -2)
        if needs_bias:
            grad_bias = rows.sum(0)
        if reduction:
            grad_x = reduction.wait()
        return grad_x, grad_weight, grad_bias, None


def mark_partial_gradient(parameter: nn.Parameter, tp: TensorParallel) -> None:
    """Note that a replicated parameter sees only this rank's tokens, if it does.

    Layer norms and the biases after g_bar work on s/t tokens under sequence parallelism, so
    each rank finds a part of their gradient.
    """
    parameter.partial_gradient = tp.sequence_parallel


def reduce_partial_gradients(module: nn.Module, tp: TensorParallel) -> None:
    """All-reduce the gradients that ``mark_partial_gradient`` noted: once an iteration, after backward.

    One all-reduce for each dtype, over all marked parameters of ``module`` together.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in module.parameters():
        if getattr(parameter, "partial_gradient", False) and parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        summed = all_reduce(torch.cat([grad.flatten() for grad in grads]), tp)
        for grad, part in zip(grads, summed.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def load_dense(module: nn.Module, dense: dict[str, Tensor], tp: TensorParallel) -> None:
    """Fill a sharded module with this rank's part of an unsharded state dict, name by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(shard(dense[name], getattr(parameter, "partition_dim", None), tp))


def shard(full: Tensor, partition_dim: int | None, tp: TensorParallel) -> Tensor:
    """This rank's part of an unsharded parameter or gradient; all of it if it is replicated."""
    return full if partition_dim is None else full.chunk(tp.size, dim=partition_dim)[tp.rank]
