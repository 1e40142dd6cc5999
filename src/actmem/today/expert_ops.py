"""Operations of a mixture of experts that keep nothing twice.

What a plain implementation keeps and these do not: the rows of the dispatched tokens, which backward
sends again, as sequence parallelism gathers again; the experts' outputs, because the routing weight
multiplies before the down product; the probabilities of experts that were not chosen.
A pair is a token and one of its experts; R pairs go to this rank's experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import TensorParallel
from actmem.today.dispatch import Dispatch


def chosen_scores(scores: Tensor, chosen: Tensor) -> Tensor:
    """The chosen experts' scores, ``[s, b, κ]`` in float32.  Keeps the choice; torch.gather keeps all scores as well."""
    return _ChosenScores.apply(scores, chosen)


def routing_weights(scores: Tensor, chosen: Tensor) -> Tensor:
    """Softmax over the chosen experts' scores alone, ``[s, b, κ]`` in float32.  Keeps its result and the choice."""
    return chosen_scores(scores, chosen).softmax(-1)


def to_experts(weights: Tensor, order: Tensor, plan: Dispatch) -> Tensor:
    """The pairs' weights ``[s, b, κ]`` to the pairs' experts, ``[R, 1]``.  Keeps the order."""
    return _ToExperts.apply(weights, order, plan)


def expert_columns(x: Tensor, order: Tensor, plan: Dispatch, *weights: Tensor) -> tuple[Tensor, ...]:
    """Dispatch, then the experts' products ``[E/t, f, h]``: ``[R, f]`` for each.  Keeps ``x`` as given and the order."""
    return _ExpertColumns.apply(x, order, plan, *weights)


def weighted_swiglu(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """weight · silu(gate) · up.  Keeps the three."""
    return _WeightedSwiGLU.apply(gate, up, weight)


def expert_rows(y: Tensor, order: Tensor, plan: Dispatch, weight: Tensor, shape: torch.Size) -> Tensor:
    """The down products ``[E/t, h, f]``, the way back, and each token's sum: ``shape``.  Keeps ``y`` and the order."""
    return _ExpertRows.apply(y, order, plan, weight, shape)


def _summed(partial: Tensor, tp: TensorParallel) -> Tensor:
    """Without sequence parallelism each rank has what its own experts found: the ranks add up."""
    return partial if tp.sequence_parallel else all_reduce(partial, tp)


def _products(rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
    """Each expert's rows times its weight, transposed as a linear's."""
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(plan.by_expert), weights)])


def _weight_gradients(grads: Tensor, rows: Tensor, plan: Dispatch) -> Tensor:
    pairs = zip(grads.split(plan.by_expert), rows.split(plan.by_expert))
    return torch.stack([grad.t() @ part for grad, part in pairs])


class _ChosenScores(Function):
    @staticmethod
    def forward(ctx, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.scores = scores.shape, scores.dtype
        top = scores.gather(-1, chosen)
        return top if top.dtype is torch.float64 else top.float()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (chosen,) = ctx.saved_tensors
        shape, dtype = ctx.scores
        return grad.new_zeros(shape).scatter_(-1, chosen, grad).to(dtype), None


class _ToExperts(Function):
    @staticmethod
    def forward(ctx, weights: Tensor, order: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan, ctx.shape = plan, weights.shape
        ctx.save_for_backward(order)
        return plan.to_experts(weights.reshape(-1, 1), order).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return _summed(ctx.plan.from_experts(grad, order).view(ctx.shape), ctx.plan.tp), None, None


class _ExpertColumns(Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, plan: Dispatch, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(x, order, *weights)
        arrived = plan.to_experts(_for_each_pair(x, order), order)
        return tuple(_products(arrived, weight, plan) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        plan: Dispatch = ctx.plan
        x, order, *weights = ctx.saved_tensors
        arrived = plan.to_experts(_for_each_pair(x, order), order)
        found: Any = sum(_products(grad, weight.transpose(1, 2), plan) for grad, weight in zip(grads, weights))
        grad_weights = [_weight_gradients(grad, arrived, plan) for grad in grads]
        grad_x = plan.from_experts(found, order).view(-1, len(order) * x.shape[-1] // x.numel(), x.shape[-1]).sum(1)
        return _summed(grad_x.view(x.shape), plan.tp), None, None, *grad_weights


def _for_each_pair(x: Tensor, order: Tensor) -> Tensor:
    """``[s, b, h]`` to ``[pairs, h]``: each token once for each of its experts."""
    tokens = x.reshape(-1, x.shape[-1])
    return tokens.repeat_interleave(len(order) // len(tokens), 0)


class _WeightedSwiGLU(Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.silu(gate).mul_(up).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up, weight = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_weight = (grad * silu * up).sum(-1, keepdim=True, dtype=weight.dtype)
        grad = grad * weight.to(grad.dtype)
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu, grad_weight


class _ExpertRows(Function):
    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, plan: Dispatch, weight: Tensor, shape: torch.Size) -> Tensor:
        ctx.plan, ctx.shape = plan, shape
        ctx.save_for_backward(y, order, weight)
        pairs = plan.from_experts(_products(y, weight, plan), order)
        tokens = shape.numel() // shape[-1]
        return _summed(pairs.view(tokens, -1, shape[-1]).sum(1).view(shape), plan.tp)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        plan: Dispatch = ctx.plan
        y, order, weight = ctx.saved_tensors
        arrived = plan.to_experts(_for_each_pair(grad, order), order)
        grad_y = _products(arrived, weight.transpose(1, 2), plan)
        return grad_y, None, None, _weight_gradients(arrived, y, plan), None


#: The autograd Function behind each operation, for tools that name it.
FUNCTIONS = {
    "chosen_scores": _ChosenScores,
    "to_experts": _ToExperts,
    "expert_columns": _ExpertColumns,
    "weighted_swiglu": _WeightedSwiGLU,
    "expert_rows": _ExpertRows,
}
