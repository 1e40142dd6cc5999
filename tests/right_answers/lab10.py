"""Right answers to lab 10: derivatives by hand, torch's checkpoint, a hook of saved tensors."""

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.right_answers.register import applied, right


@right("10.1")
def the_weight_made_by_a_hook(x, codes, scale):
    with saved_tensors_hooks(lambda tensor: None, lambda _: (codes * scale).t()):
        return x.flatten(0, 1).mm((codes * scale).t()).unflatten(0, x.shape[:2])


@right("10.2")
def the_adapter_by_checkpoint(x, weight, a, b, alpha):
    def adapter(x, a, b):
        return alpha / len(a) * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))

    return F.linear(x, weight) + checkpoint(adapter, x, a, b, use_reentrant=False)


@right("10.3")
def derivatives_by_hand(x, up, down, tile):
    def forward(ctx, x, up, down):
        ctx.save_for_backward(x, up, down)
        result = torch.empty_like(x)
        for first in range(0, len(x), tile):
            result[first : first + tile] = F.linear(F.gelu(F.linear(x[first : first + tile], up)), down)
        return result

    def backward(ctx, grad):
        x, up, down = ctx.saved_tensors
        of_x = torch.empty_like(x)
        of_up, of_down = (w.new_zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32)) for w in (up, down))
        for first in range(0, len(x), tile):
            rows, upstream = (tensor[first : first + tile].flatten(0, 1) for tensor in (x, grad))
            inside = rows @ up.t()
            of_down += upstream.t() @ F.gelu(inside)
            slope = torch.ops.aten.gelu_backward(upstream @ down, inside)
            of_up += slope.t() @ rows
            of_x[first : first + tile] = (slope @ up).view_as(of_x[first : first + tile])
        return of_x, of_up.to(up.dtype), of_down.to(down.dtype)

    return applied(forward, backward, x, up, down)
