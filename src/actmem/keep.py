"""Keep tensors for backward in a node of their own, ahead of the operation that will read them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function


class Kept:
    """Tensors in the hands of autograd: visible to saved-tensor hooks, readable in backward."""

    def __init__(self, anchor: Tensor):
        # The tensor, not its grad_fn: before torch 2.13 a node goes with the last tensor that it made.
        self._anchor = anchor

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, as autograd unpacks them."""
        return self._anchor.grad_fn.saved_tensors


def keep(*tensors: Tensor) -> Kept:
    """Save ``tensors`` through ``save_for_backward`` now, to be read in backward later.

    An attribute on ``ctx`` would hold them too, but out of sight of every hook, so that no
    ledger could count them and no checkpoint could drop them.  Keeps each tensor's storage.
    """
    with torch.enable_grad():
        # The node exists only if some input needs a gradient; the anchor has no elements.
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
        return Kept(_Keep.apply(anchor, *tensors))


class _Keep(Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise RuntimeError("a node made by keep() has nothing to differentiate")
