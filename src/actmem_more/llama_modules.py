"""What Llama's layer is made of: RMSNorm, rotary positions, the gated MLP, linears without a bias."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.drop import KEEP_ALL, NamedForward
from actmem.keep import differentiates_once
from actmem.parallel.conjugates import f_bar_or_g_bar
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import as_rows, column_parallel
from actmem.parallel.weights import ParallelModule, child_seed, mark_partial_gradient, own_weight


class RMSNorm(ParallelModule):
    """RMSNorm over the last dimension.

    Under sequence parallelism a rank sees only its own tokens, so the weight's gradient must be summed over the ranks.
    With ``of_heads`` the gradient must be summed whenever t > 1, because a rank sees only its own heads.

    Args:
        size: elements of the last dimension: h, or d with ``of_heads``.
        tp: the t ranks that share the layer.
        of_heads: True for a norm over the d elements of each head, with one weight ``[d]`` for all heads.
        factory: dtype and device of the weight.

    Saves: its input, and 4 bytes a token; with ``of_heads`` 4 bytes a token and head.
    """

    def __init__(self, size: int, tp: TensorParallel, *, of_heads: bool = False, **factory):
        super().__init__()
        weight: Any = mark_partial_gradient(nn.Parameter(torch.ones(size, **factory)), tp)
        if of_heads:
            weight.partial_gradient = tp.size > 1
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x / rms(x) · weight over the last dimension, computed in float32.

    Args:
        x: ``[…, n]``.
        weight: ``[n]``.
        eps: is added to the mean of the squares under the root, so that zeros don't divide by zero.

    Saves: x and 1/rms, 4 bytes a token.
    """
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
    @differentiates_once
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        normed = _wide(x) * inverse
        grad = _wide(grad)
        needed = ctx.needs_input_grad[1]
        grad_weight = as_rows(grad * normed).sum(0).to(weight.dtype) if needed else None
        grad = grad * _wide(weight)
        grad_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys with each head rotated by its token's position (rotary positions).

    Elements i and i + d/2 of a head are rotated as a pair, as in Hugging Face's Llama.

    Args:
        x: ``[s, b, heads, d]``.
        cos: ``[s, 1, 1, d/2]``, from ``rotary_tables``.
        sin: ``[s, 1, 1, d/2]``, from ``rotary_tables``.

    Saves: only the tables, which are constants.
    """
    return _Rotate.apply(x, cos, sin)


def rotary_tables(seq_length: int, head_size: int, theta: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Return the tables for ``rotate``: cosine and sine of each position's angles, ``[s, 1, 1, d/2]`` in float32.

    Args:
        seq_length: s, in tokens.
        head_size: d, elements of one head.
        theta: θ, the base of the angles; Llama 3's is 500,000.
    """
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float32), frequencies)[:, None, None]
    return angles.cos(), angles.sin()


class _Rotate(Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GatedMLP(ParallelModule):
    """The gated MLP down(silu(gate(x)) · up(x)). Gate and up are sharded by columns, down by rows.

    Args:
        h: elements of a token, in and out.
        width: elements of gate's and of up's output for one token, over all ranks.
        tp: the t ranks that share the MLP; t must divide ``width``.
        seed: seed from which the weights are drawn, the same on all t ranks.
        prefix: a text such as "shared ", put before the names of the saved tensors ("gate", "up", "down input").
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; ``terms``, the NamedForward of
        the layer's forward pass, which says which tensors are not saved.
    Returns: a tensor of the shape of x.
    """

    def __init__(self, h: int, width: int, tp: TensorParallel, *, seed: int, prefix: str = "", **factory):
        super().__init__()
        columns, self.tp, self.prefix = width // tp.size, tp, prefix
        self.gate, self.up = (own_weight(tp, child_seed(seed, n), columns, h, dim=0, **factory) for n in ("gate", "up"))
        self.down = own_weight(tp, child_seed(seed, "down"), h, columns, dim=1, **factory)

    def forward(self, x: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        gate, up = terms(
            (self.prefix + "gate", self.prefix + "up"), lambda x: column_parallel(x, self.tp, self.gate, self.up), x
        )
        y = terms(self.prefix + "down input", swiglu, gate, up)
        return row_parallel(y, self.down, self.tp)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up.

    Saves: ``gate`` and ``up``, and nothing else.
    """
    return _SwiGLU.apply(gate, up)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def row_parallel(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """Multiply x by a row-parallel weight and sum over the ranks.

    Args:
        x: ``[s, b, in/t]``.
        weight: ``[out, in/t]``, this rank's shard.
        tp: the t ranks that share the weight.

    Returns: ``[s, b, out]``, or ``[s/t, b, out]`` under sequence parallelism.
    Saves: x as given.
    """
    return f_bar_or_g_bar(matmul(x, weight), tp)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ, without a collective.

    Saves: x as given, a view too (of a view torch's linear would save a copy); nothing if the weight is frozen.
    """
    return column_parallel(x, TensorParallel(), weight)[0]


class ReplicatedLinear(ParallelModule):
    """A linear without a bias whose weight is not sharded: the router of experts, or the linear that makes a latent.

    Under sequence parallelism each rank computes it for its own tokens, so the weight's gradient must be summed over
    the ranks.

    Args:
        in_features: elements of a token in the input.
        out_features: elements of a token in the output.
        tp: the t ranks that hold the same weight.
        seed: seed from which the weight is drawn, the same on all t ranks.
        factory: dtype and device of the weight.

    Args of ``forward``: ``[s, b, in_features]``, or ``[s/t, b, in_features]`` under sequence parallelism.
    Returns: ``[s, b, out_features]``, or ``[s/t, b, out_features]`` under sequence parallelism.
    Saves: its input as given.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, seed: int, **factory):
        super().__init__()
        self.weight = own_weight(tp, seed, out_features, in_features, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight)
