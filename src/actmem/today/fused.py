"""Operations of today's layer that keep no tensor twice and none in a wider type.

Written out of torch's own operators each of them keeps more: an RMSNorm its float32 input and output,
a gated MLP also silu(gate), a rotation its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from actmem.parallel.groups import TensorParallel


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / rms(x) · weight over the last dimension, computed in float32.  Keeps x and 1/rms, 4 bytes a token."""
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up.  Keeps its two inputs, which the two products before it made: nothing of its own."""
    return _SwiGLU.apply(gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x ``[s, b, heads, d]``, tables ``[s, 1, 1, d/2]``.  Keeps only the tables, a constant.

    Turns element i of a head with element i + d/2, as Hugging Face's Llama does.
    """
    return _Rotate.apply(x, cos, sin)


def rotary_tables(seq_length: int, head_size: int, theta: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, ``[s, 1, 1, d/2]`` in float32."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float32), frequencies)[:, None, None]
    return angles.cos(), angles.sin()


def columns(x: Tensor, tp: TensorParallel, *weights: Tensor) -> tuple[Tensor, ...]:
    """Several column-parallel products of one input: ``[s/t, b, in]`` or ``[s, b, in]`` to ``[s, b, out/t]`` each.

    As ``parallel.linear.column_parallel``, with one gather, one reduction, and the input kept once, as given.
    """
    return _Columns.apply(x, tp, *weights)


def rows(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ.  Keeps ``x`` as given: a linear would keep a copy of a view that is not contiguous."""
    return _Rows.apply(x, weight)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [s, b, 1]
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(_wide(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        normed = _wide(x) * inverse
        grad = _wide(grad)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * _wide(weight)
        grad_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        # silu' = sigmoid + silu · (1 − sigmoid)
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


class _Rotate(Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _Columns(Function):
    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        ctx.save_for_backward(x, *weights)
        full = start_all_gather(x, tp).wait() if tp.sequence_parallel else x  # [s, b, in]
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        tp: TensorParallel = ctx.tp
        x, *weights = ctx.saved_tensors
        gather = start_all_gather(x, tp) if tp.sequence_parallel else None
        partial: Any = sum(grad @ weight for grad, weight in zip(grads, weights))  # [s, b, in] partial over t
        full = gather.wait() if gather else x
        start = start_reduce_scatter if tp.sequence_parallel else start_all_reduce
        reduction = start(partial, tp)
        grad_weights = [grad.flatten(0, -2).t() @ full.flatten(0, -2) for grad in grads]
        return reduction.wait(), None, *grad_weights


class _Rows(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.reshape(-1, x.shape[-1])


#: The autograd Function behind each operation, for tools that name it.
FUNCTIONS = {"rms_norm": _RMSNorm, "swiglu": _SwiGLU, "rotate": _Rotate, "columns": _Columns, "rows": _Rows}
