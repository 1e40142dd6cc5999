"""Column- and row-parallel linears, and the sum over the ranks of gradients of which each rank has only a part.

Column and row refer to A in Y = XA. torch stores Aᵀ, ``[out, in]``, so a column-parallel weight is sharded along
dimension 0 of ``weight`` and a row-parallel one along dimension 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import ConfigError, check_divides
from actmem.keep import differentiates_once
from actmem.main_grad import gradient_of
from actmem.parallel.collectives import all_gather, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from actmem.parallel.conjugates import f_bar_or_g_bar, f_or_g
from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, Part, mark_partial_gradient, own_weight, part_of


class ColumnParallelLinear(ParallelModule):
    """Y = XA + bias with A sharded by columns: this rank computes ``out_features / t`` columns of Y.

    Args:
        in_features: columns of X.
        out_features: columns of Y on all ranks together.
        tp: the t ranks that share A.
        seed: seed from which the weight is drawn, the same on all t ranks; None draws a seed from torch's CPU
            generator.
        factory: dtype and device of weight and bias.

    Args of ``forward``: ``[s, b, in]`` replicated, or ``[s/t, b, in]`` under sequence parallelism.
    Returns: ``[s, b, out/t]``.
    Saves: its input as given: e·sb·in bytes, or 1/t of that under sequence parallelism, with e bytes an element. With
        ``keep_gathered_input`` it saves the gathered input, e·sb·in. If the weight is frozen it saves nothing.
    Raises: ConfigError if t does not divide ``out_features``.
    Source: 2205.05198 section 4.2, figures 4 to 6.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        self.tp = tp
        shard_size = check_divides("out_features", out_features, "tensor_parallel_size", tp.size)
        self.weight = own_weight(tp, seed, shard_size, in_features, dim=0, **factory)
        bias: Any = nn.Parameter(torch.zeros(shard_size, **factory))
        bias.partition_dim = 0
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self.tp, self.weight, bias=self.bias)[0]


def column_parallel(x: Tensor, tp: TensorParallel, *weights: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Multiply one input by several column-parallel weights, such as those of Q, K and V, or of gate and up.

    The weights share the collectives: under sequence parallelism forward gathers the input once, and backward reduces
    its gradient once.

    Args:
        x: ``[s, b, in]`` replicated, or ``[s/t, b, in]`` under sequence parallelism.
        tp: the ranks that share the weights.
        weights: each ``[out/t, in]``, this rank's shard.
        bias: ``[out/t]``, with a single weight only.

    Returns: one ``[s, b, out/t]`` for each weight.
    Saves: the input once, as given; nothing if all weights are frozen.
    Raises: ConfigError on a bias with several weights.
    """
    if bias is not None and len(weights) > 1:
        raise ConfigError("bias", f"belongs to a single weight, got {len(weights)} weights")
    # Under autocast the linear would convert its input itself, but only after the gather.
    x = x.to(autocast_dtype(x))
    if tp.keep_gathered_input:
        full = f_or_g(x, tp)
        return tuple(F.linear(full, weight, bias) for weight in weights)
    return _ColumnParallel.apply(x, tp, bias, *weights)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would run a linear on ``x``; without autocast, the dtype of ``x``."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


class RowParallelLinear(ParallelModule):
    """Y = XA + bias with A sharded by rows: each rank computes a partial sum of Y, and a collective adds these up.

    The bias is added once, after the collective.

    Args:
        in_features: columns of X on all ranks together.
        out_features: columns of Y.
        tp: the t ranks that share A.
        seed: seed from which the weight is drawn, the same on all t ranks; None draws a seed from torch's CPU
            generator.
        factory: dtype and device of weight and bias.

    Args of ``forward``: ``[s, b, in/t]``.
    Returns: ``[s, b, out]``, or ``[s/t, b, out]`` under sequence parallelism.
    Saves: its input, e·sb·in/t bytes with e bytes an element; nothing if the weight is frozen.
    Raises: ConfigError if t does not divide ``in_features``.
    Source: 2205.05198 section 4.2, figures 4 to 6.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        self.tp = tp
        shard_size = check_divides("in_features", in_features, "tensor_parallel_size", tp.size)
        self.weight = own_weight(tp, seed, out_features, shard_size, dim=1, **factory)
        self.bias = mark_partial_gradient(nn.Parameter(torch.zeros(out_features, **factory)), tp)

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)  # [s, b, out] partial over t
        return f_bar_or_g_bar(partial, self.tp) + self.bias.to(partial.dtype)  # which autocast may choose


class _ColumnParallel(Function):
    """f or g, and the linears after it, as one operation that saves the input it was given, whole or sharded.

    Only the weights' gradients need the gathered input, so under sequence parallelism each rank saves its shard and
    gathers again in backward.  Each of backward's two collectives overlaps matmuls that don't depend on it: the
    gather overlaps the gradient of the input, and the reduction of that gradient overlaps the gradients of the weights.

    On CUDA a collective overlaps a matmul only if its kernel starts first.  It is launched first, but the GPU may take
    the streams in any order unless CUDA_DEVICE_MAX_CONNECTIONS=1 is set at the start (before Blackwell; not with FSDP).

    The overlap has a price at backward's peak, in the last weight's gradient: beside the gathered input and its own
    gradient, e·sb·in each, there are the shard and the place for the reduction's result, 1/t of that each (over gloo
    the received parts take as much as was sent).  The plain form has neither then, and saves the gathered input.
    """

    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel, bias: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needs_weights) else None, *(weights if needs_x else ()))
        full = all_gather(x, tp) if tp.sequence_parallel else x  # [s, b, in]
        return tuple(F.linear(full, weight, bias) for weight in weights)

    @staticmethod
    @differentiates_once
    def backward(ctx, *grads: Tensor):
        tp: TensorParallel = ctx.tp
        needs_x, _, needs_bias, *needs_weights = ctx.needs_input_grad
        x, *weights = ctx.saved_tensors
        gather = start_all_gather(x, tp) if tp.sequence_parallel and any(needs_weights) else None

        partial = _input_gradient(grads, weights) if needs_x else None  # [s, b, in] partial over t
        full = gather.wait() if gather else x
        reduction: Any = None
        if partial is not None and tp.sequence_parallel:
            reduction = start_reduce_scatter(partial, tp)
        elif partial is not None:
            reduction = start_all_reduce(partial, tp, in_place=True)
        # If the input is a view, one contiguous copy serves all weights.
        rows: Any = as_rows(full) if any(needs_weights) else None
        grads = tuple(map(as_rows, grads))
        grad_weights = [grad.t() @ rows if need else None for grad, need in zip(grads, needs_weights)]
        grad_bias = grads[0].sum(0) if needs_bias else None
        del x, full, rows, partial  # before gloo's parts are added up, in one tensor more
        grad_x = reduction.wait() if reduction else None
        return grad_x, None, grad_bias, *grad_weights


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the input's gradient: the sum over the matmuls, added up in one tensor."""
    # Under autocast the matmuls ran in another dtype than the weights have.
    weights = [weight.to(grads[0].dtype) for weight in weights]
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:]):
        as_rows(total).addmm_(as_rows(grad), weight)
    return total


def as_rows(x: Tensor) -> Tensor:
    """Return x ``[…, n]`` as ``[rows, n]``, a view if x is contiguous; ``[n]`` becomes one row."""
    return x.reshape(-1, x.shape[-1])


@torch.no_grad()
def reduce_partial_gradients(module: nn.Module, tp: TensorParallel) -> None:
    """All-reduce the gradients of which each rank has only a part. Call it once an iteration, after backward.

    These are the gradients of parameters that ``mark_partial_gradient`` marked, and of key and value heads that several
    ranks hold. The tensor that is summed is the parameter's ``main_grad`` if it has one, else its ``grad``. There is
    one all-reduce for each dtype. The gradient of a head that only some ranks share is first copied into a tensor of
    zeros for all heads, so that the same all-reduce sums it, without another process group.

    Args:
        module: the sharded model, or a part of it.
        tp: the ranks over which to sum.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Part]]] = {}
    for parameter in module.parameters():
        grad, part = gradient_of(parameter), part_of(parameter, tp)
        held_alike = hasattr(parameter, "partition") and part.size < tp.size
        if grad is not None and (held_alike or getattr(parameter, "partial_gradient", False)):
            by_dtype.setdefault(grad.dtype, []).append((grad, part))
    for pairs in by_dtype.values():
        sizes = [part.size * grad.numel() for grad, part in pairs]
        all_gradients = pairs[0][0].new_zeros(sum(sizes))
        own_parts = [zeros.chunk(part.size)[part.rank] for zeros, (_, part) in zip(all_gradients.split(sizes), pairs)]
        for own_part, (grad, _) in zip(own_parts, pairs):
            own_part.copy_(grad.flatten())
        all_reduce(all_gradients, tp, in_place=True)
        for own_part, (grad, _) in zip(own_parts, pairs):
            grad.copy_(own_part.view_as(grad))


def load_dense(module: nn.Module, dense: dict[str, Tensor], tp: TensorParallel) -> None:
    """Copy this rank's shards of an unsharded state dict into a sharded module.

    Args:
        module: the sharded module; its parameters are written.
        dense: the unsharded tensors, by the names of the module's parameters.
        tp: the ranks that share the module.

    Raises: ConfigError if ``dense`` lacks a parameter's name, if a tensor has another shape, or if ``dense`` has a name
        that the module lacks. In these cases nothing is copied.
    """
    parameters = dict(module.named_parameters())
    if unknown := dense.keys() - parameters.keys():
        raise ConfigError(min(unknown), f"is not a parameter of this {type(module).__name__}")
    shards = {}
    for name, parameter in parameters.items():
        if name not in dense:
            raise ConfigError(name, "is missing from the unsharded state")
        dim, part, wanted = getattr(parameter, "partition_dim", None), part_of(parameter, tp), list(parameter.shape)
        if dim is not None:
            wanted[dim] *= part.size
        if list(dense[name].shape) != wanted:
            raise ConfigError(name, f"must have shape {wanted} in the unsharded state, got {list(dense[name].shape)}")
        shards[name] = shard(dense[name], dim, part)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shards[name])


def shard(full: Tensor, partition_dim: int | None, part: Part | TensorParallel) -> Tensor:
    """Return this rank's shard of an unsharded parameter or gradient.

    Args:
        full: the unsharded tensor.
        partition_dim: the dimension along which it is sharded; None: it isn't, and ``full`` is returned.
        part: the number of shards (``size``), and which of them this rank holds (``rank``).
    """
    return full if partition_dim is None else full.chunk(part.size, dim=partition_dim)[part.rank]


#: The autograd Function behind ``column_parallel``, for tools that time or name it.
FUNCTIONS = {"column_parallel": _ColumnParallel}
