"""Right answers to lab 9: torch's checkpoints, the softmax kept in 16 bits, other sums of rows."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.right_answers.register import applied, right


def widened(x):
    return x if x.dtype is torch.float64 else x.float()


def plain_loss(logits, targets):
    losses = F.cross_entropy(widened(logits).flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


@right("9.1")
def loss_by_checkpoint(logits, targets):
    return checkpoint(plain_loss, logits, targets, use_reentrant=False)


@right("9.1")
def loss_that_keeps_the_softmax_in_16_bits(logits, targets):
    def forward(ctx, logits, targets):
        log_p = widened(logits).log_softmax(-1)
        onehot = F.one_hot(targets, logits.shape[-1])
        ctx.save_for_backward((log_p.exp() - onehot).to(logits.dtype))
        return -(log_p * onehot).sum(-1)

    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return (slope * grad.unsqueeze(-1)).to(slope.dtype), None

    return applied(forward, backward, logits, targets)
