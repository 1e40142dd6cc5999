"""DeepSeek-V3's routing weights (2412.19437 section 2.1.2): sigmoids of the chosen scores, divided by their sum.

Two things of its router change which experts a token takes, and no byte that a token keeps, so they are not here:
a bias on each expert's score that evens out the load, and the choice of 4 of 8 groups of experts before the
choice of experts.  Neither is a part of the weight, and backward reads only the experts that were chosen.  They
move R, the pairs that a rank takes; all of a token's 8 experts may still be on one rank of 8.  The factor
2.5 on the weights is left out as well: it is a constant.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from actmem.today.expert_ops import chosen_scores


def sigmoid_weights(scores: Tensor, chosen: Tensor) -> Tensor:
    """Sigmoids of the chosen experts' scores, ``[s, b, κ]`` in float32.  Keeps its result and the choice."""
    return chosen_scores(scores, chosen).sigmoid()


def normalised_weights(weights: Tensor) -> Tensor:
    """Each token's weights divided by their sum.  Keeps its input, which ``sigmoid_weights`` keeps too."""
    return _NormalisedWeights.apply(weights)


class _NormalisedWeights(Function):
    @staticmethod
    def forward(ctx, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return weights / weights.sum(-1, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (weights,) = ctx.saved_tensors
        whole = weights.sum(-1, keepdim=True)
        return (grad - (grad * weights).sum(-1, keepdim=True) / whole) / whole
