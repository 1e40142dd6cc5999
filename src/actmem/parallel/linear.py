"""The two linears of tensor parallelism, and the gradients that sequence parallelism leaves partial.

Column and row speak of A in Y = XA.  torch stores Aᵀ, ``[out, in]``, so a column-parallel
weight is cut along dimension 0 of ``weight`` and a row-parallel one along dimension 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import ConfigError, check_divides
from actmem.main_grad import gradient_of
from actmem.parallel.collectives import all_gather, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from actmem.parallel.conjugates import f, f_bar, g, g_bar
from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, draw_normal, mark_partial_gradient


class ColumnParallelLinear(ParallelModule):
    """Y = XA + bias with A cut by columns: this rank computes ``out_features / t`` columns of Y.

    In: ``[s, b, in]`` replicated, or ``[s/t, b, in]`` under sequence parallelism.
    Out: ``[s, b, out/t]``.  Keeps its input as given, e·sb·in bytes or 1/t of that, and nothing if
    the weight is frozen; the plain form (``keep_gathered_input``) keeps the gathered input,
    e·sb·in.  seed: see ``weights.draw_normal``.  Raises ConfigError if t does not divide
    ``out_features``.  Source: 2205.05198 section 4.2, figures 4 to 6.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        self.tp = tp
        each = check_divides("out_features", out_features, "tensor_parallel_size", tp.size)
        self.weight = nn.Parameter(torch.empty(each, in_features, **factory))
        self.bias = nn.Parameter(torch.zeros(each, **factory))
        self.mark_parameters()
        draw_normal(self.weight, tp, seed)

    def mark_parameters(self) -> None:
        for parameter in (self.weight, self.bias):
            parameter.partition_dim = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self.weight, self.bias, self.tp)


def column_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """The product behind ColumnParallelLinear, for a weight that another module owns."""
    # Under autocast the linear would convert its input itself, but only after the gather.
    x = x.to(_autocast_dtype(x))
    if tp.keep_gathered_input:
        enter = g if tp.sequence_parallel else f
        return F.linear(enter(x, tp), weight, bias)
    return _GatherInBackward.apply(x, weight, bias, tp)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run a linear on ``x``; its own dtype without autocast."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


class RowParallelLinear(ParallelModule):
    """Y = XA + bias with A cut by rows: each rank computes a partial sum of Y, and the ranks add up.

    In: ``[s, b, in/t]``.  Out: ``[s, b, out]``, or ``[s/t, b, out]`` under sequence
    parallelism.  The bias is added once, after the sum.  Keeps its input, e·sb·in/t bytes, and
    nothing if the weight is frozen.  seed: see ``weights.draw_normal``.  Raises ConfigError if t
    does not divide ``in_features``.  Source: 2205.05198 section 4.2, figures 4 to 6.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        self.tp = tp
        each = check_divides("in_features", in_features, "tensor_parallel_size", tp.size)
        self.weight = nn.Parameter(torch.empty(out_features, each, **factory))
        self.bias = nn.Parameter(torch.zeros(out_features, **factory))
        self.mark_parameters()
        draw_normal(self.weight, tp, seed)

    def mark_parameters(self) -> None:
        self.weight.partition_dim = 1  # type: ignore[attr-defined]
        mark_partial_gradient(self.bias, self.tp)

    def forward(self, x: Tensor) -> Tensor:
        leave = g_bar if self.tp.sequence_parallel else f_bar
        partial = F.linear(x, self.weight)  # [s, b, out] partial over t
        return leave(partial, self.tp) + self.bias


class _GatherInBackward(Function):
    """f or g, and the linear after it, as one operation that keeps its input as given.

    Only the weight gradient needs the gathered input, so under sequence parallelism each rank
    keeps its shard and gathers again in backward.  Each of backward's two exchanges overlaps a
    matrix product that doesn't depend on it: the gather overlaps the gradient of the input, and
    the reduction of that gradient overlaps the gradient of the weight.

    On CUDA an exchange overlaps a product only if its kernel starts first.  It is launched first
    here, but the GPU may take the two streams in any order unless CUDA_DEVICE_MAX_CONNECTIONS=1
    is set before CUDA starts.  Every gather allocates its result; the caching allocator makes that
    cheap, and no buffer is shared between layers.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        full = all_gather(x, tp) if tp.sequence_parallel else x  # [s, b, in]
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        tp: TensorParallel = ctx.tp
        x: Any  # None where no gradient reads it, as weight
        weight: Any
        # Under autocast the product ran in another dtype than the weight has.
        x, weight = (None if saved is None else saved.to(grad.dtype) for saved in ctx.saved_tensors)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: the same by operators that have a backward themselves
            enter, leave = (g, g_bar) if tp.sequence_parallel else (f, f_bar)
            rows = grad.flatten(0, -2)
            grad_x = leave(grad @ weight, tp) if needs_x else None
            grad_weight = rows.t() @ enter(x, tp).flatten(0, -2) if needs_weight else None
            return grad_x, grad_weight, rows.sum(0) if needs_bias else None, None
        gather = start_all_gather(x, tp) if tp.sequence_parallel and needs_weight else None

        partial = grad @ weight if needs_x else None  # [s, b, in] partial over t
        full = gather.wait() if gather else x
        reduction: Any = None
        if partial is not None and tp.sequence_parallel:
            reduction = start_reduce_scatter(partial, tp)
        elif partial is not None:
            reduction = start_all_reduce(partial, tp, in_place=True)
        rows = grad.flatten(0, -2)  # [sb, out/t]
        grad_weight = rows.t() @ full.flatten(0, -2) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        return reduction.wait() if reduction else None, grad_weight, grad_bias, None


def reduce_partial_gradients(module: nn.Module, tp: TensorParallel) -> None:
    """All-reduce the gradients (main gradients, if any) of parameters that ``mark_partial_gradient`` marked.

    Call it once an iteration, after backward.  One all-reduce for each dtype, over all marked
    parameters of ``module`` together.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in module.parameters():
        grad = gradient_of(parameter)
        if getattr(parameter, "partial_gradient", False) and grad is not None:
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        summed = all_reduce(torch.cat([grad.flatten() for grad in grads]), tp)
        for grad, part in zip(grads, summed.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def load_dense(module: nn.Module, dense: dict[str, Tensor], tp: TensorParallel, *, strict: bool = True) -> None:
    """Copy this rank's part of an unsharded state dict into a sharded module, name by name.

    strict=False ignores names that the module does not have: a pipeline stage loads its part of a
    whole model so.  Raises ConfigError, before anything is copied, on a missing name, an unknown
    one, or a tensor of another shape.
    """
    parameters = dict(module.named_parameters())
    if strict and (unknown := dense.keys() - parameters.keys()):
        raise ConfigError(min(unknown), f"is not a parameter of this {type(module).__name__}")
    shards = {}
    for name, parameter in parameters.items():
        if name not in dense:
            raise ConfigError(name, "is missing from the unsharded state")
        dim, wanted = getattr(parameter, "partition_dim", None), list(parameter.shape)
        if dim is not None:
            wanted[dim] *= tp.size
        if list(dense[name].shape) != wanted:
            raise ConfigError(name, f"must have shape {wanted} in the unsharded state, got {list(dense[name].shape)}")
        shards[name] = shard(dense[name], dim, tp)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shards[name])


def shard(full: Tensor, partition_dim: int | None, tp: TensorParallel) -> Tensor:
    """This rank's part of an unsharded parameter or gradient; all of it if it is replicated."""
    return full if partition_dim is None else full.chunk(tp.size, dim=partition_dim)[tp.rank]


#: The autograd Function behind ``column_parallel``, for tools that time or name it.
FUNCTIONS = {"column_parallel": _GatherInBackward}
