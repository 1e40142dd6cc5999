"""The layer norm of the paper's layer, and RMSNorm over each token or each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, mark_partial_gradient


class ParallelLayerNorm(ParallelModule, nn.LayerNorm):
    """A layer norm over h.  Keeps its input and two numbers a token.

    Under sequence parallelism it sees s/t tokens, so its own gradients are partial.
    """

    def __init__(self, hidden_size: int, tp: TensorParallel, **factory):
        super().__init__(hidden_size, **factory)
        self.tp = tp
        self.mark_parameters()

    def mark_parameters(self) -> None:
        mark_partial_gradient(self.weight, self.tp)
        mark_partial_gradient(self.bias, self.tp)


class RMSNorm(ParallelModule):
    """Over the last dimension.  Keeps its input and 4 bytes a token.  Under sequence parallelism its gradient is partial."""

    def __init__(self, size: int, tp: TensorParallel, **factory):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.mark_parameters()

    def mark_parameters(self) -> None:
        mark_partial_gradient(self.weight, self.tp)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class HeadNorm(RMSNorm):
    """Over the d elements of each head, with one weight for all heads.

    Every rank sees its own heads only, so the gradient is partial without sequence parallelism too.
    """

    def mark_parameters(self) -> None:
        self.weight.partial_gradient = self.tp.size > 1  # type: ignore[attr-defined]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / rms(x) · weight over the last dimension, computed in float32.  Keeps x and 1/rms, 4 bytes a token."""
    return _RMSNorm.apply(x, weight, eps)


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
        needed = ctx.needs_input_grad[1]
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if needed else None
        grad = grad * _wide(weight)
        grad_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


#: The autograd Functions here, for tools that time or name them.
FUNCTIONS = {"rms_norm": _RMSNorm}
