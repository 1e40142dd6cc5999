"""Lab 7: RMSNorm, SwiGLU and the linear that keeps its recipe's sources: numbers, bytes, products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.compare import check_tensor, close, grad_of
from actmem_course.judge.kept import KeptBytes, check_keeps
from actmem_course.judge.lab_checks.lab4_checkpoint import reached_once
from actmem_course.judge.lab_checks.operators import size_of
from actmem_course.judge.lab_checks.steps import Weights
from actmem_course.judge.passes import check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

#: So large that a wrong place for it shows.
_EPS = 0.25


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm out of torch's operators."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU out of torch's operators."""
    return F.silu(gate) * up


def check_rms_norm(b: Bench) -> None:
    x, weight, upstream = b.random(5, 3, 8, seed=1), b.random(8, seed=2), b.random(5, 3, 8, seed=3)
    squares = x.square().mean(-1, keepdim=True)
    inverse = torch.rsqrt(squares + _EPS)
    grad, normed, centred = upstream * weight, x * inverse, x - x.mean(-1, keepdim=True)
    through = normed * (grad * normed).mean(-1, keepdim=True)
    results = {
        "this is a layer norm: RMSNorm does not subtract the mean": plain_norm(centred, weight),
        "the squares are added up over h; take their mean": x * torch.rsqrt(8 * squares + _EPS) * weight,
        "the mean is over all tokens; each token has its own: mean(-1, keepdim=True)": x * torch.rsqrt(squares.mean() + _EPS) * weight,
        "eps is added to the root; it belongs to the mean of the squares, under the root": x / (squares.sqrt() + _EPS) * weight,
        "eps is left out": x * torch.rsqrt(squares) * weight,
        "x is multiplied by its rms; divide by it": x / inverse * weight,
    }  # fmt: skip
    gradients = {
        "x": {
            "1/rms is taken for a constant, but it depends on every element of x: subtract normed · mean(grad · normed)": grad * inverse,
            "grad · normed is added up over h; take its mean": inverse * (grad - 8 * through),
            "the part that comes through 1/rms is added; subtract it": inverse * (grad + through),
            "the mean lacks the factor weight: multiply the gradient by weight first": inverse * (grad - normed * (upstream * normed).mean(-1, keepdim=True)),
            "the gradient of x lacks the factor weight: multiply the gradient by weight first": inverse * (upstream - normed * (upstream * normed).mean(-1, keepdim=True)),
        },
        "weight": {
            "the gradient of weight comes from x; weight multiplies x/rms": (upstream * x).sum((0, 1)),
            "the gradient of weight is a mean over the tokens; all use the same weight, so add up": (upstream * normed).mean((0, 1)),
        },
    }  # fmt: skip
    factors = {"weight": weight, "1/rms": inverse}
    own = lambda y, w: b["rms_norm"](y, w, _EPS)  # noqa: E731
    _check_numbers(b, own, plain_norm, {"x": x, "weight": weight}, upstream, results, gradients, factors)
    _check_half(b, own, 1000 * x, weight, upstream)
    short = x.bfloat16()
    _check_keeps(b, "x, and 1/rms of each token", own, short, (weight.bfloat16(),), (short, inverse.float()))


def check_swiglu(b: Bench) -> None:
    gate, up, upstream = (b.random(5, 3, 8, seed=seed) for seed in (4, 5, 6))
    sigmoid = torch.sigmoid(gate)
    results = {
        "gate and up are swapped: silu is applied to up": plain_gate(up, gate),
        "gelu is applied in place of silu": F.gelu(gate) * up,
        "silu is applied to the product; it belongs to gate alone": F.silu(gate * up),
        "up is added; it must multiply": F.silu(gate) + up,
    }
    gradients = {
        "gate": {
            "the gradients of gate and up are swapped: return that of the first argument first": upstream * F.silu(gate),
            "the slope of silu is taken for σ(gate): the factor gate depends on gate too": upstream * up * sigmoid,
            "the slope of silu is taken for that of σ, σ(1 − σ); silu is gate · σ": upstream * up * sigmoid * (1 - sigmoid),
            "the slope of silu lacks the part σ": upstream * up * gate * sigmoid * (1 - sigmoid),
            "silu is taken for its own slope": upstream * up * F.silu(gate),
        },
        "up": {"the gradient of up is that of a sum; multiply it by silu(gate)": upstream},
    }  # fmt: skip
    factors = {"gate": gate, "σ(gate)": sigmoid, "up": up}
    _check_numbers(b, b["swiglu"], plain_gate, {"gate": gate, "up": up}, upstream, results, gradients, factors)
    both = torch.stack([gate, up]).bfloat16()
    _check_keeps(b, "gate and up", lambda z: b["swiglu"](z[0], z[1]), both, (), tuple(both))


def check_recipe_linear(b: Bench) -> None:
    x, norm, up, weight = (b.random(*size, seed=7) for size in ((5, 3, 8), (8,), (5, 3, 8), (4, 8)))
    _check_recipe(b, plain_norm, {"weight": weight, "x": x, "the norm's weight": norm})
    _check_recipe(b, plain_gate, {"weight": weight, "gate": x, "up": up.flip(0)})
    # Whole numbers, so that no order of a sum changes a bit.
    factors = {"weight": weight, "the first factor": x, "the second factor": up.flip(0)}
    _check_recipe(b, torch.mul, {name: torch.round(4 * tensor) for name, tensor in factors.items()}, exact=True)
    short, weights = x.bfloat16(), (weight.bfloat16(), norm.bfloat16())
    own = lambda y, w, n: b["recipe_linear"](plain_norm, w, y, n)  # noqa: E731
    _check_keeps(b, "the recipe's sources", own, short, weights, (short,))


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
    _check_numbers(b, own, plain, arguments, upstream, results, gradients)
    runs.clear()
    with b.watching(), FlopCounterMode(display=False) as flops:
        _, found = _run(own, arguments, upstream)
    for name, right in _run(plain, arguments, upstream)[1].items() if exact else ():
        if not torch.equal(found[name], right):
            raise Wrong(f"the gradient of {name} is right up to rounding, but not bit for bit: use the same numbers")
    if (products := flops.get_total_flops() // (2 * first[..., 0].numel() * weight.numel())) > 3:
        again = "backward runs the linear again, and nobody reads its result. Run the recipe alone again"
        raise Wrong(f"forward and backward run {products} matrix products where 3 are enough: {again}")
    if len(runs) > 2:
        raise Wrong(f"the recipe runs {len(runs)} times; once in forward and once in backward are enough")


def _run(function: Callable[..., Tensor], arguments: Weights, upstream: Tensor) -> tuple[Tensor, Weights]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in arguments.items()}
    result = function(*leaves.values())
    result.backward(upstream)
    return result.detach(), {name: grad_of(leaf) for name, leaf in leaves.items()}


def _check_numbers(
    b: Bench, own: Callable[..., Tensor], plain: Callable[..., Tensor], arguments: Weights, upstream: Tensor,
    results: Weights, gradients: Mapping[str, Weights], factors: Weights | None = None,
) -> None:  # fmt: skip
    """Result and gradients are those of ``plain``, what torch's operators find.

    results, gradients: diagnosis -> what a mistake makes.  factors: what may be missing, or there twice.
    """

    def explain(found: Tensor, right: Tensor) -> list[str]:
        named = {name: factor.expand_as(right) for name, factor in (factors or {}).items() if right.dim() == 3}
        fits = ["has the digits of float32: compute in wide(x), which leaves float64 as it is"] * close(
            found, right, 1e-5
        )
        fits += [f"lacks the factor {name}" for name, factor in named.items() if close(found * factor, right)]
        return fits + [f"has the factor {name} twice" for name, factor in named.items() if close(found, right * factor)]

    expected, right = _run(plain, arguments, upstream)
    passes = run_passes(
        b, own, arguments, expected=expected, upstream=upstream, mistakes=results, explain=lambda y: explain(y, expected)
    )  # fmt: skip
    for name, value in right.items():
        as_it_came = {f"the gradient of {name} is the one that backward was given, as it came": upstream}
        check_gradient(
            passes, name, value, {**gradients.get(name, {}), **as_it_came}, explain=lambda y: explain(y, value)
        )


def _check_half(b: Bench, own: Callable[..., Tensor], x: Tensor, weight: Tensor, upstream: Tensor) -> None:
    """Raise Wrong unless float16 numbers whose squares are no float16 numbers come out right."""
    expected, right = _run(plain_norm, {"x": x, "weight": weight}, upstream)
    with b.watching():
        result, found = _run(own, {"x": x.half(), "weight": weight.half()}, upstream.half())
    for name, value in (("the result", expected), *right.items()):
        half = found.get(name, result)
        if half.dtype is not torch.float16:
            check_tensor(f"for a float16 x, {name}", half, value.half())
        if not close(half.double() / value.abs().max(), value / value.abs().max(), 1e-2):
            which = f"the gradient of {name}" if name in right else name
            square = (
                "the square of 300 is no float16 number any more, so compute in wide(x), in forward and in backward"
            )
            raise Wrong(f"right in float64, but for a float16 x {which} is not: {square}")


def _check_keeps(
    b: Bench, what: str, own: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor], needed: Sequence[Tensor]
) -> None:
    """Raise Wrong if the function keeps more than ``needed``, and say which tensors."""

    def beside(found: KeptBytes) -> str:
        left, words = [(tensor.dtype, tuple(tensor.shape)) for tensor in needed], []
        for saved in sorted(found.ledger.saved, key=lambda saved: -saved.bytes):
            if (saved.dtype, tuple(saved.shape)) in left:
                left.remove((saved.dtype, tuple(saved.shape)))
                continue
            how = "a wider copy: widen again" if saved.dtype.itemsize > x.dtype.itemsize else "make it again"
            size = f"{str(saved.dtype).removeprefix('torch.')} {list(saved.shape)} of {saved.bytes:,} B"
            words.append(f"{size} ({how} in backward)")
        return "not needed: " + "; ".join(words)

    check_keeps(b, sum(map(size_of, needed)), what, own, x, weights, more=beside)
