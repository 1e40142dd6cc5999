"""Causal attention of one part of the sequence, whose keys and values lie on c ranks.

torch's flash kernel can't do it in one call.  On a CPU it lines a causal mask up with the first key, so only
the first chunk of a sequence may use it; with a mask of its own it keeps that mask, which grows with s².
So each chunk of the queries makes two calls: one over the keys before it, without a mask, and one over its own
keys, a square with a causal mask.  The log-sum-exps say how to add the two results up; with their sum
each call's backward finds its own part of the gradients (as ring attention does, 2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.checks import ConfigError
from actmem.today.context import ContextParallel
from actmem.torch_private import flash_attention, flash_backward, flash_on_cpu, flash_on_cpu_backward


def attend_part(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    """Q ``[b, heads, s/c, d]`` and K, V ``[b, kv heads, s/c, d]`` of this rank's tokens to ``[s/c, b, heads·d]``.

    Under "gather-plain" K and V are ``[b, kv heads, s, d]``, gathered before.  Keeps the three as given, its
    result, and the log-sum-exp of each query over all its keys, 4 bytes.  "gather" gathers K and V, and again in backward.
    """
    return _PartAttention.apply(q, k, v, context).flatten(2)


class _PartAttention(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
        if q.is_cuda and q.element_size() != 2:
            raise ConfigError("dtype", "context parallelism runs a flash kernel, which takes only 16 bits on a GPU")
        ctx.context = context
        keys, values = _whole(k, context), _whole(v, context)
        b, heads, length, d = q.shape
        result = q.new_empty(length, b, heads, d)
        sums = torch.empty(b, heads, length, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        for own, calls in _calls(context, length):
            parts = [_flash(q[:, :, own], keys[:, :, seen], values[:, :, seen], is_causal) for seen, is_causal in calls]
            total = torch.stack([lse for _, lse in parts]).logsumexp(0)
            sums[:, :, own] = total
            merged: Any = sum(out * (lse - total).exp()[..., None] for out, lse in parts)
            result[own] = merged.permute(2, 0, 1, 3).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, sums)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        context: ContextParallel = ctx.context
        q, k, v, result, sums = ctx.saved_tensors
        keys, values = _whole(k, context), _whole(v, context)
        grad, result = (x.view_as(result).permute(1, 2, 0, 3) for x in (grad.contiguous(), result))
        # As their inputs lie, tokens first, so that no collective needs a copy.
        grad_q, grad_keys, grad_values = (_zeros_like(x) for x in (q, keys, values))
        for own, calls in _calls(context, q.shape[2]):
            for seen, is_causal in calls:
                found = _flash_backward(
                    grad[:, :, own], q[:, :, own], keys[:, :, seen], values[:, :, seen],
                    result[:, :, own], sums[:, :, own].contiguous(), is_causal,
                )  # fmt: skip
                for total, rows, part in zip((grad_q, grad_keys, grad_values), (own, seen, seen), found):
                    total[:, :, rows] += part
        return grad_q, _own(grad_keys, context), _own(grad_values, context), None


def _calls(context: ContextParallel, length: int) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """For each chunk of this rank's queries: where they lie, and of each call the keys and whether its mask is causal."""
    each = length // len(context.own_chunks)
    found = []
    for place, chunk in enumerate(context.own_chunks):
        before, own = slice(0, chunk * each), slice(chunk * each, (chunk + 1) * each)
        found.append((slice(place * each, (place + 1) * each), [(before, False)] * (chunk > 0) + [(own, True)]))
    return found


def _whole(x: Tensor, context: ContextParallel) -> Tensor:
    """Keys or values of all tokens, ``[b, kv heads, s, d]``."""
    if context.kind == "gather-plain":
        return x
    return context.gathered(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _own(grad: Tensor, context: ContextParallel) -> Tensor:
    """The gradient of what this rank gave: its own tokens', summed over the ranks whose queries read them."""
    if context.kind == "gather-plain":  # the conjugate of g does it
        return grad
    return context.scattered(grad.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _zeros_like(x: Tensor) -> Tensor:
    """``[b, heads, s, d]`` as a view of a tensor with the tokens first."""
    b, heads, length, d = x.shape
    return x.new_zeros(length, b, heads, d).permute(1, 2, 0, 3)


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The kernel's result ``[b, heads, queries, d]`` and the log-sum-exp of each query."""
    if q.is_cuda:
        return flash_attention(q, k, v, 0.0, is_causal)[:2]
    return flash_on_cpu(q, k, v, 0.0, is_causal)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through one call, given the result and the log-sum-exp of all calls."""
    if q.is_cuda:
        lengths, no_state = (q.shape[2], k.shape[2]), q.new_empty(2, dtype=torch.uint64)  # no dropout: not read
        return flash_backward(grad, q, k, v, out, lse, None, None, *lengths, 0.0, is_causal, no_state, no_state)
    return flash_on_cpu_backward(grad, q, k, v, out, lse, 0.0, is_causal)


#: The autograd Function of the attention, for tools that name it.
FUNCTIONS = {"attend_part": _PartAttention}
