"""A right answer to lab 9: the softmax saved in 16 bits."""

import torch
import torch.nn.functional as F

from tests.right_answers.register import applied, right


def widened(x):
    return x if x.dtype is torch.float64 else x.float()


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
