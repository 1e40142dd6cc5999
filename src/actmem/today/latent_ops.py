"""Attention whose values have another width than its queries and keys, keeping what it is given and nothing wider.

torch's flash kernel for CPUs wants one width.  ``scaled_dot_product_attention`` then falls back to the plain form,
which keeps the scores, as²b of them; zeros beside the values, as many implementations add them, keep
a wider V and a wider output.  The zeros change no product, so here they come and go with each call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.torch_private import flash_on_cpu, flash_on_cpu_backward


def attend_uneven(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, q and k ``[b, heads, s, d]``, v ``[b, heads, s, d_v]``, to ``[s, b, heads·d_v]``.

    Keeps q, k, v, the result, and 4 bytes a query.  On a GPU torch's memory-efficient kernel takes two widths (not measured).
    """
    if q.device.type == "cpu" and q.shape[-1] != v.shape[-1]:
        context = _UnevenAttention.apply(q, k, v)
    else:
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return context.permute(2, 0, 1, 3).flatten(2)


def _widened(width: int, *tensors: Tensor) -> list[Tensor]:
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]


class _UnevenAttention(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.width, ctx.scale = max(q.shape[-1], v.shape[-1]), q.shape[-1] ** -0.5
        context, log_sum_exp = flash_on_cpu(*_widened(ctx.width, q, k, v), 0.0, True, scale=ctx.scale)
        # As the kernel lays its output out, [b, s, heads, d_v], but without the zeros.
        context = (
            context[..., : v.shape[-1]].transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        )
        ctx.save_for_backward(q, k, v, context, log_sum_exp)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, context, log_sum_exp = ctx.saved_tensors
        grad, *wide = _widened(ctx.width, grad, q, k, v, context)
        grads = flash_on_cpu_backward(grad, *wide, log_sum_exp, 0.0, True, scale=ctx.scale)
        return tuple(grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v)))


#: The autograd Function behind the operation, for tools that name it.
FUNCTIONS = {"attend_uneven": _UnevenAttention}
