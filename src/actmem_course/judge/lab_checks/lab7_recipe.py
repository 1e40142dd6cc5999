"""Lab 7: the linear that keeps its recipe's sources: numbers, bytes, products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.lab_checks.lab4_checkpoint import reached_once
from actmem_course.judge.lab_checks.lab7_operators import (
    Weights,
    check_keeps_only,
    check_like_plain,
    plain_gate,
    plain_norm,
    result_and_gradients,
)
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


def check_recipe_linear(b: Bench) -> None:
    x, norm, up, weight = (b.random(*size, seed=7) for size in ((5, 3, 8), (8,), (5, 3, 8), (4, 8)))
    _check_recipe(b, plain_norm, {"weight": weight, "x": x, "the norm's weight": norm})
    _check_recipe(b, plain_gate, {"weight": weight, "gate": x, "up": up.flip(0)})
    # Whole numbers, so that no order of a sum changes a bit.
    factors = {"weight": weight, "the first factor": x, "the second factor": up.flip(0)}
    _check_recipe(b, torch.mul, {name: torch.round(4 * tensor) for name, tensor in factors.items()}, exact=True)
    short, weights = x.bfloat16(), (weight.bfloat16(), norm.bfloat16())
    own = lambda y, w, n: b["recipe_linear"](plain_norm, w, y, n)  # noqa: E731
    check_keeps_only(b, "the recipe's sources", own, short, weights, (short,))


def _check_recipe(b: Bench, recipe: Callable[..., Tensor], arguments: Weights, exact: bool = False) -> None:
    """Numbers, to the bit if ``exact``; products; how often the recipe runs."""
    (weight, first, _), upstream = arguments.values(), torch.round(4 * b.random(5, 3, 4, seed=10))
    runs = []

    def counted(*sources: Tensor) -> Tensor:
        runs.append(sources)
        return recipe(*sources)

    def own(w: Tensor, *sources: Tensor) -> Tensor:
        return b["recipe_linear"](counted, w, *sources)

    def plain(w: Tensor, *sources: Tensor) -> Tensor:
        return F.linear(recipe(*sources), w)

    results = {"the recipe is left out: the first source is the linear's input": F.linear(first, weight)}
    from_source = "the gradient of weight comes from the first source; the linear's input is recipe(*sources)"
    not_through = "the gradient of a source is that of the linear's input: go on through the recipe"
    gradients = {
        "weight": {from_source: upstream.flatten(0, 1).t() @ first.flatten(0, 1)},
        list(arguments)[1]: {not_through: upstream @ weight},
    }
    inputs = [tensor.clone().requires_grad_() * 1 for tensor in arguments.values()]
    with b.watching():
        result = own(*inputs)
        if isinstance(result, Tensor) and result.shape == upstream.shape and result.requires_grad:
            with reached_once(inputs):
                result.backward(upstream)
    check_like_plain(b, own, plain, arguments, upstream, results, gradients)
    runs.clear()
    with b.watching(), FlopCounterMode(display=False) as flops:
        _, found = result_and_gradients(own, arguments, upstream)
    for name, right in result_and_gradients(plain, arguments, upstream)[1].items() if exact else ():
        if not torch.equal(found[name], right):
            raise Wrong(f"the gradient of {name} is right up to rounding, but not bit for bit: use the same numbers")
    if (products := flops.get_total_flops() // (2 * first[..., 0].numel() * weight.numel())) > 3:
        again = "backward runs the linear again, and nobody reads its result. Run the recipe alone again"
        raise Wrong(f"forward and backward run {products} matrix products where 3 are enough: {again}")
    if len(runs) > 2:
        raise Wrong(f"the recipe runs {len(runs)} times; once in forward and once in backward are enough")
