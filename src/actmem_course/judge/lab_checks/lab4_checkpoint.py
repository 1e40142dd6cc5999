"""Lab 4's checkpoint functions: gradients and bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.compare import check_tensor, close
from actmem_course.judge.kept import KeptBytes, kept
from actmem_course.judge.operators import size_of
from actmem_course.judge.passes import reached_once
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench, unchanged


def bytes_without_states(found: KeptBytes) -> int:
    """Bytes kept, the states of random-number generators left out: these are flat tensors of uint8."""
    return sum(t.bytes for t in found.saved if not (t.dtype is torch.uint8 and len(t.shape) == 1))


def check_hides_nothing(found: KeptBytes) -> None:
    """Raise Wrong if some bytes are kept out of the hooks' sight."""
    if found.hidden_bytes > 0:
        raise Wrong(
            f"it keeps {found.hidden_bytes:,} B where no hook can see them (tensors as an attribute of ctx, or in a "
            "closure): pass them to ctx.save_for_backward, or to keep"
        )


def flops_of(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """FLOPs of matrix products, forward and backward, by torch's counter."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with FlopCounterMode(display=False) as counter:
        result = function(*leaves)
        result.backward(torch.ones_like(result))
    return counter.get_total_flops()


class _Region:
    """A region to checkpoint that counts its runs: two matrix products with parameters of its own."""

    def __init__(self, b: Bench):
        self.up = b.random(256, 64, seed=1).requires_grad_()
        self.down = b.random(64, 256, seed=2).requires_grad_()
        self.runs = 0

    def __call__(self, x: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        self.runs += 1
        return F.linear(torch.tanh(F.linear(x, self.up) * gate) * mask, self.down) + x


def check_checkpoint(b: Bench, name: str = "checkpoint") -> None:
    checkpoint = b[name]
    x, gate, upstream = b.random(16, 4, 64, seed=3), b.random(16, 4, 1, seed=4), b.random(16, 4, 64, seed=5)
    mask = b.random(16, 4, 256, seed=6) > 0
    expected, wanted, ones = _plain(b, x, gate, mask, upstream)

    region = _Region(b)
    leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_()]
    inputs = {"the first input": leaves[0] * 1, "the second input": leaves[1] * 1}
    with unchanged(**inputs):
        result = checkpoint(region, *inputs.values(), mask)
    check_tensor("the result", result, expected)
    if region.runs != 1:
        raise Wrong(f"forward runs function {region.runs} times; once is enough")
    if not result.requires_grad:
        raise Wrong(
            "the result is right, but it has no graph: what runs under no_grad records none. Run function in the forward of an "
            "autograd Function whose backward runs it again"
        )
    gradient = upstream.clone()
    with unchanged(**{"the gradient that backward is given": gradient}), reached_once(inputs.values()):
        result.backward(gradient)
    _check_runs(region.runs)
    _check_order(b, checkpoint)
    found = {
        "the first input": leaves[0].grad,
        "the second input": leaves[1].grad,
        "a parameter": region.up.grad,
        "another parameter": region.down.grad,
    }
    for (what, value), right, with_ones in zip(found.items(), wanted, ones):
        if value is None and "parameter" in what:
            raise Wrong(
                "the parameters that function uses get no gradient: torch.autograd.grad reaches only the tensors it is given; torch.autograd.backward reaches all"
            )
        if value is None:
            raise Wrong(
                f"the forward is right, but {what} gets no gradient: does backward run function on inputs that require one, with grad enabled?"
            )
        check_tensor(
            f"the forward is right; the gradient of {what}",
            value,
            right,
            {
                f"the gradient of {what} ignores the incoming gradient: pass it to torch.autograd.backward(y, grad)": with_ones,
                f"the gradient of {what} is twice what it should be: both runs recorded a graph": 2 * right,
            },
        )
    _check_bytes(b, checkpoint, x, gate, mask)


def _check_order(b: Bench, checkpoint: Callable) -> None:
    """Raise Wrong if each input gets the gradient of another."""
    sizes = (3, 4, 5)
    leaves = [b.random(*sizes, seed=seed).requires_grad_() for seed in (31, 32, 33)]
    right = [leaves[1] * leaves[2], leaves[0] * leaves[2], leaves[0] * leaves[1]]
    checkpoint(lambda x, y, z: x * y * z, *(leaf * 1 for leaf in leaves)).backward(
        torch.ones(sizes, device=b.device).double()
    )
    found = [leaf.grad for leaf in leaves]
    if any(grad is None or not close(grad, value) for grad, value in zip(found, right)) and all(
        grad is not None and any(close(grad, value) for value in right) for grad in found
    ):
        raise Wrong(
            "the gradients are right, but in another order than the inputs: backward returns None for function, and then the "
            "gradients in the order in which forward was given the inputs"
        )


def _plain(
    b: Bench, x: Tensor, gate: Tensor, mask: Tensor, upstream: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Result and gradients without checkpoint; and the gradients of the result's sum."""
    region = _Region(b)
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    result = region(x, gate, mask)
    arguments = (x, gate, region.up, region.down)
    gradients = torch.autograd.grad(result, arguments, upstream, retain_graph=True)
    return result.detach(), list(gradients), list(torch.autograd.grad(result.sum(), arguments))


def _check_runs(runs: int) -> None:
    if runs == 1:
        raise Wrong(
            "function runs once only: the first run's graph was kept; backward must run function again, from the inputs"
        )
    if runs > 2:
        raise Wrong(f"function runs {runs} times in all; once forward and once in backward is enough")


def _check_bytes(b: Bench, checkpoint: Callable, x: Tensor, gate: Tensor, mask: Tensor) -> None:
    region = _Region(b)
    weights = [region.up.detach(), region.down.detach()]

    def function(y: Tensor, up: Tensor, down: Tensor) -> Tensor:
        region.up, region.down = up, down
        return checkpoint(region, y, gate.clone(), mask.clone())  # copies, which nobody else holds

    found = kept(b, function, x, weights)
    check_hides_nothing(found)
    enough = size_of(x) + size_of(gate) + size_of(mask)
    if bytes_without_states(found) > enough:
        raise Wrong(
            f"it keeps {bytes_without_states(found):,} B for backward where {enough:,} B, the inputs, are enough: let the first run "
            f"keep nothing. The largest: {found.largest()}"
        )
