"""python my/labs/lab10_keep_less.py

Lab 10: save less (frozen weights, adapters, an MLP in tiles).

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them.  For a hint, add --hint 10.1.

Letters as in 2205.05198: s tokens, b sequences, h hidden size; a linear has h inputs and o outputs, an
adapter has rank r, and an MLP is f wide inside.  Weights are as torch stores them, [o, h].  Save tensors for
backward with ctx.save_for_backward; what is held in any other way escapes the count.  No function may write to
a tensor that it was given.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


# given: the dtype to compute in
def wide(x: Tensor) -> Tensor:
    """Return x in float32, or x itself if its dtype is float64."""
    return x if x.dtype is torch.float64 else x.float()


# given: what 10.3 runs in tiles
def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute an MLP, down(gelu(up(x))).

    Args:
        x: [..., h].
        up: [f, h], a weight.
        down: [h, f], a weight.

    Returns:
        [..., h].
    """
    return F.linear(F.gelu(F.linear(x, up)), down)


# 10.1
def frozen_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return F.linear(x, codes * scale), for a weight that is stored in 8 bits and doesn't train.

    Args:
        x: [s, b, h].
        codes: int8 [o, h], the weight in 8 bits.
        scale: [o, 1], in the dtype of x, the factor of each row of codes.

    Returns:
        [s, b, o]; only x gets a gradient.

    Saves: nothing but codes and scale, which the model holds anyway.  torch's operators save codes * scale, 2oh bytes
        in 16 bits; if the weight trained, they would also save x, 2sbh.
    Source: 2205.05198 section 4.1 counts the inputs of linears that train.
    """
    return _FrozenLinear.apply(x, codes, scale)


class _FrozenLinear(Function):
    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.save_for_backward(codes, scale)
        return F.linear(x, codes * scale)

    @staticmethod
    def backward(ctx, grad):
        codes, scale = ctx.saved_tensors
        return grad @ (codes * scale), None, None


# 10.2
def lora_linear(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return F.linear(x, weight) + alpha/r · F.linear(F.linear(x, a), b), where only a and b train.

    Make no tensor of the size of weight, neither weight + alpha/r · b @ a nor a gradient of weight.  Multiply by weight
    once in forward and once in backward, in the dtype of x.

    Args:
        x: [s, b, h].
        weight: [o, h], in the dtype of x, frozen.
        a: [r, h], in the dtype of wide(x): float32, or float64 if x has float64.
        b: [o, r], in the dtype of a.
        alpha: a number; the adapter's output is scaled by alpha/r.

    Returns:
        [s, b, o].  x, a and b get gradients of their own dtypes (those of a and b may be rounded to the dtype of x
        first).

    Saves: x and F.linear(x, a) in the dtype of x, 2sbh + 2sbr bytes in 16 bits, beside weight, a and b.
    Source: 2205.05198 section 4.1 counts 2sbh for a linear.
    """
    return _LoraLinear.apply(x, weight, a, b, alpha)


class _LoraLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, a, b, alpha):
        ctx.scale = alpha / len(a)
        low = F.linear(x, a.to(x.dtype))
        ctx.save_for_backward(x, low, weight, a, b)
        return F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        x, low, weight, a, b = ctx.saved_tensors
        scaled = ctx.scale * grad
        grad_low = scaled @ b.to(x.dtype)
        grad_x = grad @ weight + grad_low @ a.to(x.dtype)
        grad_a = grad_low.flatten(0, 1).t() @ x.flatten(0, 1)
        grad_b = scaled.flatten(0, 1).t() @ low.flatten(0, 1)
        return grad_x, None, grad_a.to(a.dtype), grad_b.to(b.dtype), None


# 10.3
def tiled_mlp(x: Tensor, up: Tensor, down: Tensor, tile: int) -> Tensor:
    """Return mlp(x, up, down), but compute ``tile`` positions of the sequence at a time.

    At any time in forward and backward at most four tensors [tile, b, f] may be alive, and three of the size of x,
    three of up and three of down.  Forward and backward together run at most 8 matmuls of s·b·h·f multiplications,
    where mlp runs 6.

    Args:
        x: [s, b, h].
        up: [f, h], a weight.
        down: [h, f], a weight.
        tile: how many of the s positions one tile has; it need not divide s.

    Returns:
        [s, b, h].  The gradients are those of mlp; add up the gradients of up and down over the tiles in the dtype of
        wide(up), float32.

    Saves: x, 2sbh bytes in 16 bits, where mlp saves 2sbh + 4sbf.
    Source: 2506.13996.
    """
    return _TiledMlp.apply(x, up, down, tile)


class _TiledMlp(Function):
    @staticmethod
    def forward(ctx, x, up, down, tile):
        ctx.tile = tile
        ctx.save_for_backward(x, up, down)
        return torch.cat([mlp(rows, up, down) for rows in x.split(tile)])

    @staticmethod
    def backward(ctx, grad):
        x, up, down = ctx.saved_tensors
        grad_up, grad_down = torch.zeros_like(wide(up)), torch.zeros_like(wide(down))
        grads_x = []
        for rows, upstream in zip(x.split(ctx.tile), grad.split(ctx.tile)):
            inputs = [tensor.detach().requires_grad_() for tensor in (rows, up, down)]
            with torch.enable_grad():
                y = mlp(*inputs)
            of_rows, of_up, of_down = torch.autograd.grad(y, inputs, upstream)
            grads_x.append(of_rows)
            grad_up += of_up
            grad_down += of_down
        return torch.cat(grads_x), grad_up.to(up.dtype), grad_down.to(down.dtype), None
