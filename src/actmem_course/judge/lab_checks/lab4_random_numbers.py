"""Lab 4's checkpoint functions where the region draws random numbers: are they the same in the second run?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import close, grad_of
from actmem_course.judge.passes import reached_once
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


def _generators_state(device: str) -> Tensor:
    """State of the default generator that functions on this device draw from."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def _set_state(state: Tensor, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def seed_and_draw(seed: int, device: str) -> None:
    """Seed the generators, and go on from there: what came before a region draws as well.

    Right after the seed its state is the seed's own, and a second run that starts from the seed would look right.
    """
    torch.manual_seed(seed)
    torch.rand(7, device=device)


def check_checkpoint_of_dropout(b: Bench, name: str = "checkpoint") -> None:
    checkpoint, device = b[name], b.device
    weight, x, upstream = b.random(32, 16, seed=7), b.random(8, 4, 16, seed=8), b.random(8, 4, 32, seed=9)

    runs = 0

    def function(y: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return F.dropout(torch.tanh(F.dropout(F.linear(y, weight), 0.5)), 0.5)

    def run(wrap: Callable) -> tuple[Any, ...]:
        """Result, gradient, and the generator's state before, after forward, before backward, after backward."""
        seed_and_draw(_SEED, device)
        nonlocal runs
        runs, leaf = 0, x.clone().requires_grad_()
        states = [_generators_state(device)]
        start = leaf * 1
        result = wrap(function, start)
        if not isinstance(result, Tensor) or result.shape != upstream.shape:
            said = f"is {list(result.shape)}" if isinstance(result, Tensor) else f"is {type(result).__name__}"
            raise Wrong(f"the result {said}; expected what function returns, a tensor of shape {list(upstream.shape)}")
        if not result.requires_grad:
            raise Wrong(
                "the result has no graph: what runs under no_grad records none, so wrap it in a torch.autograd.Function"
            )
        states.append(_generators_state(device))
        torch.rand(5, device=device)  # the rest of the model draws as well
        states.append(_generators_state(device))
        with reached_once([start]):
            result.backward(upstream)
        states.append(_generators_state(device))
        return result.detach(), leaf.grad, *states

    plain, found = run(lambda f, y: f(y)), run(checkpoint)
    if not torch.equal(found[0], plain[0]):
        raise Wrong(
            "the result differs from function's own although the generator starts in the same state: forward must not seed or draw by itself"
        )
    if not torch.equal(found[3], plain[3]):
        raise Wrong(
            "after forward the generator's state is not what it is without checkpoint: forward may read the state, not change it"
        )
    if runs < 2:
        raise Wrong(
            "function runs once only, so there is no second run that could draw the same numbers: 4.1 comes first"
        )
    if found[1] is None:
        raise Wrong("the input gets no gradient: 4.1 comes first")
    if not close(found[1], plain[1]):
        raise Wrong(_explain_gradient(function, x, upstream, plain, found[1], device))
    if not torch.equal(found[5], plain[5]):
        raise Wrong(_explain_state(function, x, plain, found[5], device))
    _check_two_regions(b, checkpoint)


def _check_two_regions(b: Bench, checkpoint: Callable) -> None:
    """Two regions whose backward is still to come, as in every model: each needs what it drew itself.

    In a chain backward comes to the last region first; from two results, in the order in which one asks.
    """
    up, down = b.random(16, 16, seed=11), b.random(16, 16, seed=12)
    x, upstream = b.random(8, 4, 16, seed=13), b.random(8, 4, 16, seed=14)

    def first(y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.linear(y, up)), 0.5)

    def second(y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.linear(y, down)), 0.25)

    def chained(wrap: Callable, leaf: Tensor) -> None:
        wrap(second, wrap(first, leaf * 1) * 1).backward(upstream)

    def of_one_function(wrap: Callable, leaf: Tensor) -> None:
        wrap(first, wrap(first, leaf * 1) * 1).backward(upstream)

    def side_by_side(wrap: Callable, leaf: Tensor) -> None:
        results = wrap(first, leaf * 1), wrap(second, leaf * 2)
        for result in results:
            result.backward(upstream)

    for run, how in (
        (chained, "in a row"),
        (of_one_function, "of the same function"),
        (side_by_side, "side by side, the first one's backward first"),
    ):
        gradients = []
        for wrap in (lambda f, y: f(y), checkpoint):
            seed_and_draw(_SEED, b.device)
            leaf = x.clone().requires_grad_()
            run(wrap, leaf)
            gradients.append(grad_of(leaf))
        if not close(gradients[1], gradients[0]):
            raise Wrong(
                f"right for one region, wrong for two {how}: each needs the inputs and the generator's state of its own first run, so "
                "keep them with the region (ctx.save_for_backward), not in a variable that all regions share"
            )


_SEED = 77


def _explain_gradient(function: Callable, x: Tensor, upstream: Tensor, plain: tuple, found: Tensor, device: str) -> str:
    """Which random numbers did the second run draw?"""
    torch.manual_seed(_SEED)
    starts = {
        "the second run draws other random numbers than the first, so it drops other elements: restore "
        "the generator's state from before the first run": plain[4],
        "the second run starts from the generator's state after the first run: save the state before it": plain[3],
        "the second run starts from the seed, not from the state that the generator had before the first run: "
        "torch.get_rng_state()": _generators_state(device),
    }
    for diagnosis, state in starts.items():
        _set_state(state, device)
        leaf = x.clone().requires_grad_()
        function(leaf).backward(upstream)
        if close(found, grad_of(leaf)):
            return diagnosis
    return "with dropout the gradient is wrong: the second run does not draw the random numbers of the first"


def _explain_state(function: Callable, x: Tensor, plain: tuple, found: Tensor, device: str) -> str:
    _set_state(plain[2], device)
    function(x)
    after_run = _generators_state(device)
    if torch.equal(found, after_run):
        return (
            "after backward the generator is where the second run left it, so later dropouts repeat numbers: restore the "
            "state from before the second run"
        )
    if torch.equal(found, plain[2]):
        return "after backward the generator is in the state that was saved in forward: restore the state from before the second run"
    return "after backward the generator's state is not what it is without checkpoint: restore the state from before the second run"
