"""Lab 7: RMSNorm and SwiGLU: the numbers of torch's operators, fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import check_tensor, close, grad_of
from actmem_course.judge.kept import KeptBytes, check_keeps, kept
from actmem_course.judge.operators import size_of
from actmem_course.judge.passes import check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

Weights = Mapping[str, Tensor]
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
    check_like_plain(b, own, plain_norm, {"x": x, "weight": weight}, upstream, results, gradients, factors)
    _check_half(b, own, 1000 * x, weight, upstream)
    wider = {"x": b.random(5, 3, 12, seed=11), "weight": b.random(12, seed=12)}
    with b.watching():
        found, right = (result_and_gradients(f, wider, b.random(5, 3, 12, seed=13)) for f in (own, plain_norm))
    if not all(map(close, (found[0], *found[1].values()), (right[0], *right[1].values()))):
        raise Wrong(
            "right where h is 8, and wrong where it is 12: every mean is over the last dimension, whatever its size"
        )
    short = x.bfloat16()
    check_keeps_only(b, "x, and 1/rms of each token", own, short, (weight.bfloat16(),), (short, inverse.float()))
    statistics = [s for s in kept(b, own, short, (weight.bfloat16(),)).saved if s.bytes < short[..., 0].numel() * 4]
    if statistics:
        raise Wrong(
            f"it keeps {statistics[0].text}: a number a token with 8 bits of it left. Keep 1/rms as wide(x) has it"
        )


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
    check_like_plain(b, b["swiglu"], plain_gate, {"gate": gate, "up": up}, upstream, results, gradients, factors)
    both = torch.stack([gate, up]).bfloat16()
    check_keeps_only(b, "gate and up", lambda z: b["swiglu"](z[0], z[1]), both, (), tuple(both))


def result_and_gradients(
    function: Callable[..., Tensor], arguments: Weights, upstream: Tensor
) -> tuple[Tensor, Weights]:
    """What autograd finds, by the arguments' names."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in arguments.items()}
    result = function(*leaves.values())
    result.backward(upstream)
    return result.detach(), {name: grad_of(leaf) for name, leaf in leaves.items()}


def check_like_plain(
    b: Bench, own: Callable[..., Tensor], plain: Callable[..., Tensor], arguments: Weights, upstream: Tensor,
    results: Weights, gradients: Mapping[str, Weights], factors: Weights | None = None,
) -> None:  # fmt: skip
    """Result and gradients are those of ``plain``, what torch's operators find.

    results, gradients: diagnosis -> what a mistake makes.  factors: what may be missing, or there twice.
    """

    def explain(found: Tensor, right: Tensor) -> list[str]:
        named = {name: factor.expand_as(right) for name, factor in (factors or {}).items() if right.dim() == 3}
        digits = "has the digits of float32: compute in wide(x), which leaves float64 as it is"
        fits = [digits] if close(found, right, 1e-5) else []
        fits += [f"lacks the factor {name}" for name, factor in named.items() if close(found * factor, right)]
        return fits + [f"has the factor {name} twice" for name, factor in named.items() if close(found, right * factor)]

    expected, right = result_and_gradients(plain, arguments, upstream)
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
    expected, right = result_and_gradients(plain_norm, {"x": x, "weight": weight}, upstream)
    with b.watching():
        result, found = result_and_gradients(own, {"x": x.half(), "weight": weight.half()}, upstream.half())
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


def check_keeps_only(
    b: Bench, what: str, own: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor], needed: Sequence[Tensor]
) -> None:
    """Raise Wrong if the function keeps more than ``needed``, and say which tensors."""

    def beside(found: KeptBytes) -> str:
        left, words = [(tensor.dtype, tuple(tensor.shape)) for tensor in needed], []
        for saved in sorted(found.saved, key=lambda saved: -saved.bytes):
            for dtype, shape in saved.views:
                if (dtype, shape) in left:
                    left.remove((dtype, shape))
                    continue
                how = "a wider copy: widen again" if dtype.itemsize > x.dtype.itemsize else "make it again"
                size = math.prod(shape) * dtype.itemsize
                words.append(f"{str(dtype).removeprefix('torch.')} {list(shape)} of {size:,} B ({how} in backward)")
        return "not needed: " + "; ".join(words)

    check_keeps(b, sum(map(size_of, needed)), what, own, x, weights, more=beside)
