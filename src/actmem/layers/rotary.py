"""Rotary positions: pairs of a head's elements, turned by angles that grow with the token's position."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


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


#: The autograd Functions here, for tools that time or name them.
FUNCTIONS = {"rotate": _Rotate}
