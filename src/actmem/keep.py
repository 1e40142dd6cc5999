"""Keep tensors for backward in a node of their own, ahead of the operation that will read them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function


class Kept:
    """Tensors in the hands of autograd: visible to saved-tensor hooks, readable in backward.

    anchor: a tensor without elements.  An operation that takes it as an input has the tensors
    let go of as soon as its backward is over; otherwise they stay as long as this object.
    """

    def __init__(self, anchor: Tensor):
        # The tensor, not its grad_fn: before torch 2.13 a node goes with the last tensor that it made.
        self.anchor = anchor

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, as autograd unpacks them."""
        return self.anchor.grad_fn.saved_tensors


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
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad: None):
        # Run for what autograd does after it: let go of what the node saved.
        return (None,) * len(ctx.needs_input_grad)
