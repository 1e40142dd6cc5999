"""Lab 10: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from actmem.torch_private import no_dispatch_modes
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import grad_of
from actmem_more.store import HostMemory

#: No two tensors of a case have as many elements, and a weight has more than any that is as long as the sequence.
_S, _B, _H, _O, _R = 25, 3, 96, 80, 4
_IN_16_BITS = {name: f"compute with {name} in 16 bits, in forward and in backward" for name in ("x", "a", "b")}
_IN_16_BITS[""] = "the products are those of tensors of 16 bits"
_ONCE = "backward goes twice through what function made: once, torch.autograd.backward(y, grad)"
_STILL = "where x needs no gradient, "
_OF_ITS_OWN = "each region reads the x of its own: hold what put returned in its own ctx"


def frozen_linear(r: CaseRun) -> None:
    codes = (50 * r.each(_O, _H)).round().clamp(-127, 127).to(torch.int8)
    scale, x = 0.01 + r.each(_O, 1).abs() / 100, r.each(_S, _B, _H)

    def own(y: Tensor) -> Tensor:
        return r["frozen_linear"](y, codes, scale.to(y.dtype))

    across = r.each(_B, _S, _O).transpose(0, 1)  # not contiguous, as what a transposition gives
    r.passes(own, {"x": x}, upstream=across)
    half, half_scale = x.bfloat16(), scale.bfloat16()
    r.passes(own, {"x": half}, how="half", prefix="for a bfloat16 x, ", why=_IN_16_BITS)
    fresh = codes.clone()  # of which no earlier call has made anything
    r.keeps(lambda y: r["frozen_linear"](y, fresh, half_scale), half, others=[fresh, half_scale])


def lora_linear(r: CaseRun) -> None:
    x, weight, a, b = r.each(_S, _B, _H), r.each(_O, _H), r.each(_R, _H), r.each(_O, _R)
    alpha = 11.0  # alpha // r is neither alpha / r nor 1

    def own(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return r["lora_linear"](y, weight.to(y.dtype), a, b, alpha)

    before = weight._version
    r.passes(own, {"x": x, "a": a, "b": b})
    r.passes(own, {"x": x, "a": a, "b": b}, prefix=_STILL, still=("x",))
    r.see("the number of writes to weight", weight._version - before, "equal", "it is given, and others read it")
    half, half_weight, low = x.bfloat16(), weight.bfloat16(), "F.linear(x, a) in 16 bits"
    given = {"x": half, "a": a.float(), "b": b.float()}

    def of_half(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return r["lora_linear"](y, half_weight, a, b, alpha)

    with FlopCounterMode(display=False) as flops:  # in 16 bits, where a wide copy of weight is another tensor
        made = r.makes(of_half, given, how="half", others=[half_weight])
    for when, one in made.items():
        words = f"{when} makes {one.what}: {{found:,}} elements, where x has {{enough:,}}. Nothing as large as weight is needed"
        r.see(f"the largest tensor of {when}", max(x.numel(), one.elements), "most", words)
    # The adapter's products are less than half a product with the weight in all.
    products = flops.get_total_flops() // (2 * x.numel() * _O)
    many = "forward and backward run {found} products with weight where {enough} are enough: one for the result, one for x's gradient; weight itself gets none"
    r.see("products", products, "most", many)
    r.passes(of_half, given, how="half", prefix="for a bfloat16 x, ", why=_IN_16_BITS)
    r.keeps(of_half, *given.values(), what=f"x and {low}", others=[half_weight], itself=True)


def tiled_mlp(r: CaseRun) -> None:
    s, b, h, f, tile = 41, 7, 2, 128, 2  # tile divides neither s nor b
    x, up, down = r.each(s, b, h), r.each(f, h), r.each(h, f)

    def own(y: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return r["tiled_mlp"](y, up, down, tile)

    into = "backward of a tile goes on into up and down: take its gradients for detached copies, torch.autograd.grad, and add them up"
    r.passes(own, {"x": x, "up": up, "down": down}, twice=into)
    r.passes(own, {"x": x, "up": up, "down": down}, prefix=_STILL, still=("x",))
    r.passes(
        lambda *given: r["tiled_mlp"](*given, 2 * s), {"x": x, "up": up, "down": down}, prefix="with one tile for all, "
    )
    with FlopCounterMode(display=False) as flops:
        made = r.makes(own, {"x": x, "up": up, "down": down})
    enough = 8 * (4 * tile * b * f + 3 * sum(tensor.numel() for tensor in (x, up, down)))
    # Rows of the largest tensor inside the MLP -> what is tiled.
    tiled = {
        s * b: "the MLP runs for the whole sequence at once: run it for ``tile`` positions at a time",
        s * tile: "the sequences are tiled, not their positions: split dimension 0",
        -(-s // tile) * b: "there are ``tile`` tiles: each has ``tile`` positions, so split, not chunk",
    }
    causes = {when: tiled.get(one.elements // f, "") for when, one in made.items()}
    for when, one in made.items():
        both = "forward and backward" if len({*causes.values()}) == 1 else when
        words = f"in {both} {causes[when]}. In " if causes[when] else "in "
        words += f"{when} {{found:,}} B live at once, where {{enough:,}} are enough: four tensors [tile, b, f], three of each of x, "
        words += f"up and down. Most of it: {one.most()}"
        r.see(f"the peak of {when}", max(enough, one.peak), "most", words)
    products = -(-flops.get_total_flops() // (2 * s * b * h * f))
    many = "forward and backward run {found} products of s·b·h·f where {enough} are enough: two in forward, two again and four gradients in backward"
    r.see("products", max(8, products), "most", many)
    r.keeps(own, x.bfloat16(), up.bfloat16(), down.bfloat16(), what="x", itself=True)
    # The same row in each of 300 tiles: in bfloat16, 256 of them and one more are 256.
    given = [x[0, 0].abs().expand(300, 1, h), up.abs(), down.abs()]
    half = [tensor.bfloat16().requires_grad_() for tensor in given]
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    F.linear(F.gelu(F.linear(exact[0], exact[1])), exact[2]).sum().backward()
    r["tiled_mlp"](*half, 1).sum().backward()
    words = "with 300 tiles in bfloat16, the gradient of {name} is {{found}} % off: add up the tiles in wide({name})"
    for name, own_weight, weight in zip(("up", "down"), half[1:], exact[1:]):
        off = (grad_of(own_weight) - grad_of(weight)).abs().max() / grad_of(weight).abs().max()
        r.see(f"{name} in bfloat16", max(2, math.ceil(100 * off)), "most", words.format(name=name))


class CountingHost(HostMemory):
    """Counts bytes and elements put, bytes that it holds, and copies brought back; what is on it, no count of the device's sees."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_put = self.elements_put = self.brought_back = 0
        self._copies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def bytes_held(self) -> int:
        return sum(self._copies.values())

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        with no_dispatch_modes(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            fetch: Any = super().put(flat, name)
        self.elements_put += flat.numel()
        self.bytes_put += flat.numel() * flat.element_size()
        self._copies[fetch.__self__] = flat.numel() * flat.element_size()

        def bring_back() -> Tensor:
            self.brought_back += 1
            return fetch()

        return bring_back


def offloading_checkpoint(r: CaseRun) -> None:
    x, up, down = r.each(9, 4, 16), r.each(64, 16), r.each(16, 64)
    host, runs = CountingHost(), 0

    def own(y: Tensor, up: Tensor, down: Tensor) -> Tensor:
        def region(z: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return F.linear(torch.tanh(F.linear(z, up)), down) + z

        return r["offloading_checkpoint"](region, y, host)

    in_forward: list[int] = []

    def once(*given: Tensor) -> Tensor:
        result = own(*given)
        in_forward[:] = runs, host.brought_back
        return result

    given = {"x": x, "the first weight": up, "the second weight": down}
    r.passes(once, given, how="bits", twice=_ONCE)
    r.see("the number of copies brought back in forward", in_forward[1], "equal", "bring it back in backward")
    r.see("the number of copies brought back", host.brought_back, "equal", "backward takes x from the host, once")
    r.see("the number of runs in forward", in_forward[0], "equal", "forward runs function once")
    r.see("the number of runs", runs, "equal", "forward runs function once, and backward once")
    before = host.brought_back
    r.passes(own, given, how="bits", prefix=_STILL, still=("x",))
    brought = host.brought_back - before
    r.see(
        f"{_STILL}the number of copies brought back",
        brought,
        "equal",
        "what function keeps for its weights is as large",
    )
    r.passes(
        lambda y: own(own(y, up, down), up, down),
        {"x": x},
        how="bits",
        prefix="with two regions in a row, ",
        why={"x": _OF_ITS_OWN},
    )
    leaf = x.clone().requires_grad_()
    for result in [own(leaf * 1, up, down), own(leaf * 2, up, down)]:
        result.backward(x)
    words = "with two regions side by side, the first one's backward first, the gradient of x"
    r.see_tensor(words, leaf.grad, "bits", _OF_ITS_OWN)
    half = x.bfloat16()
    host, weights = CountingHost(), (up.bfloat16(), down.bfloat16())
    r.passes(lambda y: own(y, *weights), {"x": half}, how="bits", prefix="for a bfloat16 x, ")
    words = "the host is given {found:,} {what}, where x has {enough:,}: put x, once, in the dtype that it has"
    r.see("elements put", host.elements_put, "most", words.replace("{what}", "elements"))
    r.see("bytes put", host.bytes_put, "most", words.replace("{what}", "B"))
    words = "the host still holds {found:,} B after backward: hold what put returned in ctx only"
    r.see("bytes held", host.bytes_held, "most", words)
    r.keeps(lambda y: own(y, *weights), half, others=weights)


MISTAKES = {
    "10.1": r"""
        return grad @ (codes * scale) -> return F.linear(grad, codes * scale) | the forward is right; backward multiplies by the transposed weight: y = x Wᵀ, so the gradient of x is grad @ W
        codes * scale -> codes * scale / 127 | the weight is divided by 127: scale is what one step of a code is worth, so the weight is codes * scale
        codes * scale -> (codes * scale.to(codes.dtype)).to(scale.dtype) | scale is rounded to a whole number, in the dtype of codes, and 0.01 is 0 there: codes * scale has the dtype of scale
        return grad @ (codes * scale) -> return grad @ (codes * scale).abs() | the forward is right; the gradient of x comes from the weight without its signs: it is codes * scale in backward too
        return F.linear(x, codes * scale) -> return F.linear(x.round(), codes * scale) | x is rounded to whole numbers: only the weight is stored in 8 bits
        return F.linear(x, codes * scale) -> return F.linear(x, codes.to(x.dtype)) | the scale is missing in forward: the weight is codes * scale
        return grad @ (codes * scale) -> return grad @ codes.to(grad.dtype) | the forward is right; the gradient of x lacks the scale: in backward too the weight is codes * scale
        return grad @ (codes * scale) -> return (grad * scale.t()) @ (codes * scale) | the forward is right; the gradient of x has the scale twice: grad @ (codes * scale) has it already
        return F.linear(x, codes * scale) -> return F.linear(x, codes * scale.mean()) | every row is multiplied by the mean scale: each of the o rows has its own
        return _FrozenLinear.apply(x, codes, scale) -> return F.linear(x, codes * scale) | forward and gradient are right; the widened weight is kept: keep codes and scale, and multiply them again in backward
        ctx.save_for_backward(codes, scale) -> ctx.save_for_backward(codes, scale, x) ;; codes, scale = ctx.saved_tensors -> codes, scale, _ = ctx.saved_tensors | forward and gradient are right; x is kept: only the gradient of a weight reads it, and this weight gets none
        return _FrozenLinear.apply(x, codes, scale) -> return F.linear(x, (codes * scale).requires_grad_()) | forward and gradient are right; x and the widened weight are kept, as for a weight that trains: this one gets no gradient
        return _FrozenLinear.apply(x, codes, scale) -> if id(codes) not in globals().setdefault("widened", {}):\n        widened[id(codes)] = codes * scale\n    return _FrozenLinear.apply(x, codes, scale) ;; return F.linear(x, codes * scale) -> ctx.key = id(codes)\n        return F.linear(x, widened[ctx.key].to(x.dtype)) ;; grad @ (codes * scale) -> grad @ widened[ctx.key].to(grad.dtype) | forward and gradient are right; the widened weight stays in a variable, where no hook can see it: multiply codes and scale each time, and let the product go
        return F.linear(x, codes * scale) -> return F.linear(x, codes * scale[0]) | every row is multiplied by the first scale: each of the o rows has its own
        return grad @ (codes * scale) -> return grad @ (codes * scale[0]) | the forward is right; in backward every row is multiplied by the first scale: each of the o rows has its own
        return grad @ (codes * scale) -> return grad @ (codes * scale.mean()) | the forward is right; in backward every row is multiplied by the mean scale: each of the o rows has its own
        return grad @ (codes * scale) -> return grad @ (codes / scale) | the forward is right; in backward the codes are divided by the scale: multiply
        return F.linear(x, codes * scale) -> return F.linear(x, codes / scale) | the codes are divided by the scale: multiply
    """,
    "10.2": r"""
        ctx.scale = alpha / len(a) -> ctx.scale = alpha | alpha is not divided by r: the adapter is scaled by alpha/r
        ctx.scale = alpha / len(a) -> ctx.scale = alpha / len(a) ** 0.5 | alpha is divided by the root of r (rank-stabilised LoRA does that): here it is alpha/r
        ctx.scale = alpha / len(a) -> ctx.scale = alpha // len(a) | alpha/r is cut to a whole number: divide with /
        ctx.scale = alpha / len(a) -> ctx.scale = alpha / a.shape[1] | alpha is divided by h: r is the number of rows of a
        + ctx.scale * F.linear(low -> + F.linear(low | the adapter isn't scaled in forward: multiply it by alpha/r
        return F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype)) -> return ctx.scale * (F.linear(x, weight) + F.linear(low, b.to(x.dtype))) | the frozen product is scaled too: alpha/r belongs to the adapter alone
        grad_b = scaled -> grad_b = grad | the forward is right; the gradient of b lacks the factor alpha/r
        grad_low = scaled @ -> grad_low = grad @ | the forward is right; the gradient that goes through b to a and x lacks the factor alpha/r
        ` + grad_low @ a.to(x.dtype)` ->  | the forward is right; the gradient of x is that of the frozen product alone: add the adapter's
        grad_x = grad @ weight + grad_low -> grad_x = grad_low | the forward is right; the gradient of x is that of the adapter alone: the frozen product passes one on, too
        return F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype)) -> return F.linear(x, weight + ctx.scale * (b @ a).to(x.dtype)) | forward and gradients are right; forward makes a tensor as large as the frozen weight: weight + alpha/r · b @ a, or a wide copy of weight? Neither is needed: multiply x by weight as it is, and by a, and that by b
        return F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype)) -> weight.addmm_(b.to(x.dtype), a.to(x.dtype), alpha=ctx.scale)\n        y = F.linear(x, weight)\n        weight.addmm_(b.to(x.dtype), a.to(x.dtype), alpha=-ctx.scale)\n        return y | the adapter is merged into weight and taken out again: others read weight, and rounding stays in it. Multiply x by a, and that by b
        return grad_x, None, grad_a -> return grad_x, grad.flatten(0, 1).t() @ x.flatten(0, 1), grad_a | forward and gradients are right; backward makes a tensor as large as the frozen weight. Its gradient, or weight + alpha/r · b @ a? Neither is needed
        return _LoraLinear.apply(x, weight, a, b, alpha) -> return F.linear(x, weight) + (alpha / len(a) * F.linear(F.linear(x.to(a.dtype), a), b)).to(x.dtype) | forward and gradients are right; x is kept in 32 bits, and so is F.linear(x, a): write a torch.autograd.Function that keeps both in the dtype of x, and rounds a and b again in backward
        return _LoraLinear.apply(x, weight, a, b, alpha) -> return F.linear(x, weight) + alpha / len(a) * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)) | forward and gradients are right; 16-bit copies of a and b are kept: write a torch.autograd.Function that saves a and b, and rounds them again in backward
        return _LoraLinear.apply(x, weight, a, b, alpha) -> from torch.utils.checkpoint import checkpoint\n    lora = lambda x, a, b: F.linear(x, weight) + alpha / len(a) * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))\n    return checkpoint(lora, x, a, b, use_reentrant=False) | forward and gradients are right; backward runs the frozen product again, which nothing needs: keep x and F.linear(x, a)
        grad_b = scaled -> grad_b = ctx.scale * scaled | the forward is right; the gradient of b has the factor alpha/r twice
        grad_a = grad_low -> grad_a = 1 / ctx.scale * grad_low | the forward is right; the gradient of a lacks the factor alpha/r
        grad_a = grad_low -> grad_a = ctx.scale * grad_low | the forward is right; the gradient of a has the factor alpha/r twice
        grad_low = scaled @ -> grad_low = ctx.scale * scaled @ | the forward is right; the gradient that goes through b to a and x has the factor alpha/r twice
    """,
    "10.3": r"""
        grad_up += of_up\n            grad_down += of_down -> grad_up, grad_down = of_up, of_down | the forward is right; the gradients of up and down are the last tile's alone: add up those of all tiles
        grad_up += of_up\n -> grad_up = of_up\n | the forward is right; the gradient of up is the last tile's alone: add up those of all tiles
        grad_down += of_down\n -> grad_down = of_down\n | the forward is right; the gradient of down is the last tile's alone: add up those of all tiles
        return torch.cat(grads_x), grad_up.to(up.dtype), grad_down.to(down.dtype), None -> return torch.cat(grads_x), (grad_up / len(grads_x)).to(up.dtype), (grad_down / len(grads_x)).to(down.dtype), None | the forward is right; the gradients of up and down are the means over the tiles: they are sums
        for rows in x.split(tile)]) -> for rows in x[: max(1, len(x) // tile) * tile].split(tile)]) | the positions after the last whole tile are missing: tile need not divide s
        torch.zeros_like(wide(up)), torch.zeros_like(wide(down)) -> torch.zeros_like(up), torch.zeros_like(down) | right in float64; in bfloat16 the gradients of many tiles are added up in 16 bits, where one more than 256 alike adds nothing: add up in wide(up) and wide(down)
        return _TiledMlp.apply(x, up, down, tile) -> return mlp(x, up, down) | forward and gradients are right; the MLP runs for the whole sequence at once: run it for ``tile`` positions at a time
        return _TiledMlp.apply(x, up, down, tile) -> return torch.cat([mlp(rows, up, down) for rows in x.split(tile)]) | forward and gradients are right; autograd keeps the inside of every tile: keep x alone, and make each tile's inside again in backward
        return torch.cat(grads_x), -> whole = torch.zeros_like(x)\n        for of_rows in grads_x:\n            whole[: len(of_rows)] = of_rows\n        return whole, | the forward is right; each tile's gradient of x is written where the first tile's belongs: it belongs to its own positions
        grad_up += of_up\n            grad_down += of_down -> grad_up, grad_down = [*grad_up, of_up], [*grad_down, of_down] ;; torch.zeros_like(wide(up)), torch.zeros_like(wide(down)) -> [], [] ;; grad_up.to(up.dtype), grad_down.to(down.dtype) -> sum(map(wide, grad_up)).to(up.dtype), sum(map(wide, grad_down)).to(down.dtype) | forward and gradients are right; the weights' gradients of all tiles live until they are added up: add each tile's to one sum as it comes
        grad_down += of_down -> grad_down += upstream.flatten(0, 1).t() @ F.linear(rows, up).flatten(0, 1) | the forward is right; the gradient of down reads F.linear(x, up): it needs what GeLU makes of that
        torch.autograd.grad(y, inputs, upstream) -> torch.autograd.grad(y, inputs, grad[: len(y)]) | the forward is right; every tile takes the first rows of the incoming gradient: each has its own
        [mlp(rows, up, down) for -> [F.linear(F.gelu(F.linear(rows, up), approximate="tanh"), down) for | GeLU is made by its tanh formula: mlp has the exact one, F.gelu(x)
        [mlp(rows, up, down) for -> [F.linear(F.linear(rows, up), down) for | GeLU between the two products is missing in forward: call mlp
        y = mlp(*inputs) -> y = F.linear(F.gelu(F.linear(*inputs[:2]), approximate="tanh"), inputs[2]) | the forward is right; backward goes through GeLU's tanh formula: mlp has the exact one
        of_rows, of_up, of_down = torch.autograd.grad(y, inputs, upstream) -> of_up = (upstream @ down).flatten(0, 1)\n            of_down = torch.autograd.grad(y, inputs, upstream)[2]\n            of_rows, of_up = (upstream @ down) @ up, of_up.t() @ rows.flatten(0, 1) | the forward is right; the gradients of x and up lack GeLU's derivative, at F.linear(x, up)
    """,
    "10.4": r"""
        x if x.requires_grad else x.detach().requires_grad_() -> x | where x needs no gradient, the weights that function uses get none either: apply must be given a tensor that needs one
        return _OffloadingCheckpoint.apply( -> if not x.requires_grad:\n        return function(x)\n    return _OffloadingCheckpoint.apply( | where x needs no gradient, nothing is offloaded, and autograd keeps what the gradients of function's weights read
        torch.autograd.backward(y, grad)\n        return None, None, x.grad -> return None, None, *torch.autograd.grad(y, x, grad) | the forward is right; the weights that function uses get no gradient: torch.autograd.grad reaches only what it is given; torch.autograd.backward reaches all
        ctx.function, ctx.fetch = function, host.put(x, "x")\n        return function(x) -> y = function(x)\n        ctx.function, ctx.fetch = function, host.put(y, "y")\n        return y | the forward is right; the result is on the host, not x: backward runs function from its input
        ctx.function, ctx.fetch = function, host.put(x, "x") -> globals()["latest"] = host.put(x, "x")\n        ctx.function = function ;; ctx.fetch() -> latest() | with two regions, backward takes the last one's x for both: hold what put returned in the region's own ctx
        ctx.function, ctx.fetch = function, host.put(x, "x") -> globals().setdefault("stack", []).append(host.put(x, "x"))\n        ctx.function = function ;; ctx.fetch() -> stack.pop()() | with two regions side by side, backward takes the other one's x: a stack is right for a chain only. Hold what put returned in the region's own ctx
        ctx.function, ctx.fetch = function, host.put(x, "x") -> ctx.function = function\n        ctx.save_for_backward(x) ;; ctx.fetch() -> ctx.saved_tensors[0].detach() | forward and gradients are right; the given host never gets x: put it there in forward, and take it from there in backward
        host.put(x, "x")\n -> [host.put(x, "x")()].pop\n | forward and gradients are right; x is brought back in forward, and stays on the device until backward: call what put returned in backward
        return _OffloadingCheckpoint.apply( -> host.put(x, "x")\n    return function(x)\n    return _OffloadingCheckpoint.apply( | forward and gradients are right; function runs once, and autograd keeps what backward needs: run it in the forward of a torch.autograd.Function, and again in backward
        return _OffloadingCheckpoint.apply( -> with torch.autograd.graph.saved_tensors_hooks(lambda y: host.put(y, "y"), lambda fetch: fetch()):\n        return function(x)\n    return _OffloadingCheckpoint.apply( | all that function keeps goes to the host, and function runs once: put x alone, and run function again in backward
        host.put(x, "x")\n -> host.put(x.bfloat16(), "x")\n ;; ctx.fetch() -> ctx.fetch().to(grad.dtype) | the forward is right; the host holds x rounded to 16 bits: put it in the dtype that it has
        host.put(x, "x")\n -> host.put(wide(x), "x")\n ;; ctx.fetch() -> ctx.fetch().to(grad.dtype) | forward and gradients are right; the host holds x in 32 bits: put it in the dtype that it has
        ctx.fetch = function, host.put(x, "x")\n -> ctx.fetch = function, host.put(x, "x")\n        globals().setdefault("everything", []).append(ctx.fetch)\n | forward and gradients are right; the host holds x after backward: hold what put returned in ctx only, which goes with the graph
    """,
}
