"""Lab 10: its cases, the functions that test a learner's answers."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import grad_of
from actmem_course.judge.observations import HalfTensor
from actmem_course.judge.verdict import Fault

#: No two tensors of a case have as many elements, and a weight has more than any that is as long as the sequence.
_S, _B, _H, _O, _R = 25, 3, 96, 80, 4
_IN_16_BITS: Mapping[str, str | Fault] = {
    name: f"compute with {name} in 16 bits, in forward and in backward" for name in ("x", "a", "b")
} | {"": "the matmuls are those of tensors of 16 bits"}
_NOTHING = "nothing as large as weight is needed: no alpha/r · b @ a, no wide copy, and no gradient of weight"
_AS_IT_IS = "multiply by weight as it is, and by a and b one after the other"
_FROZEN = "where x needs no gradient, "


def frozen_linear(r: CaseRun) -> None:
    codes = (50 * r.each(_O, _H)).round().clamp(-127, 127).to(torch.int8)
    scale, x = 0.01 + r.each(_O, 1).abs() / 100, r.each(_S, _B, _H)

    def own(y: Tensor) -> Tensor:
        return r["frozen_linear"](y, codes, scale.to(y.dtype))

    across = r.each(_B, _S, _O).transpose(0, 1)  # not contiguous, as what a transposition gives
    r.observe(own, {"x": x}, upstream=across)
    half, half_scale = x.bfloat16(), scale.bfloat16()
    r.observe(own, {"x": half}, kind=HalfTensor, prefix="for a bfloat16 x, ", advice=_IN_16_BITS)
    fresh = codes.clone()  # of which no earlier call has made anything
    again = "keep neither x nor the weight: make codes * scale again in backward, in a torch.autograd.Function"
    r.saves(lambda y: r["frozen_linear"](y, fresh, half_scale), half, repair=again, others=[fresh, half_scale])


def lora_linear(r: CaseRun) -> None:
    x, weight, a, b = r.each(_S, _B, _H), r.each(_O, _H), r.each(_R, _H), r.each(_O, _R)
    alpha = 11.0  # alpha // r is neither alpha / r nor 1

    def own(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return r["lora_linear"](y, weight.to(y.dtype), a, b, alpha)

    before = weight._version
    r.observe(own, {"x": x, "a": a, "b": b})
    r.observe(own, {"x": x, "a": a, "b": b}, prefix=_FROZEN, frozen=("x",))
    r.see_value("the number of writes to weight", weight._version - before, cause="it is given, and others read it")
    half, half_weight, low = x.bfloat16(), weight.bfloat16(), "F.linear(x, a) in 16 bits"
    given = {"x": half, "a": a.float(), "b": b.float()}

    def of_half(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return r["lora_linear"](y, half_weight, a, b, alpha)

    with FlopCounterMode(display=False) as flops:  # in 16 bits, where a wide copy of weight is another tensor
        passes = r.makes(of_half, given, kind=HalfTensor, others=[half_weight])
    for when, noted in passes.items():
        words = f"{when} makes {noted.what}: {{found:,}} elements, where x has {{enough:,}}"
        r.see_cost(words, max(x.numel(), noted.elements), _AS_IT_IS, _NOTHING, f"largest of {when}")
    # The adapter's matmuls are less than half a matmul with the weight in all.
    matmuls = flops.get_total_flops() // (2 * x.numel() * _O)
    enough = "one for the result, one for x's gradient; weight itself gets none"
    words = "forward and backward run {found} matmuls with weight where {enough} are enough"
    r.see_cost(words, matmuls, enough)
    r.observe(of_half, given, kind=HalfTensor, prefix="for a bfloat16 x, ", advice=_IN_16_BITS)
    alone = f"save x and {low}, and nothing that is made of weight"
    r.saves(of_half, *given.values(), what=f"x and {low}", repair=alone, others=[half_weight], itself=True)


def tiled_mlp(r: CaseRun) -> None:
    s, b, h, f, tile = 41, 7, 2, 128, 2  # tile divides neither s nor b
    x, up, down = r.each(s, b, h), r.each(f, h), r.each(h, f)

    def own(y: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return r["tiled_mlp"](y, up, down, tile)

    copies = "take its gradients for detached copies, torch.autograd.grad, and add them up"
    into = Fault("backward of a tile goes on into up and down", copies)
    given = {"x": x, "up": up, "down": down}
    r.observe(own, given, fault_if_reached_twice=into)
    r.observe(own, given, prefix=_FROZEN, frozen=("x",))
    r.observe(lambda *given: r["tiled_mlp"](*given, 2 * s), given, prefix="with one tile for all, ")
    r.saves(own, *(tensor.bfloat16() for tensor in given.values()), what="x", itself=True)
    with FlopCounterMode(display=False) as flops:
        passes = r.makes(own, given)
    enough = 8 * (4 * tile * b * f + 3 * sum(tensor.numel() for tensor in given.values()))
    # Rows of the largest tensor inside the MLP -> what is tiled.
    tiled = {
        s * b: ("the MLP runs for the whole sequence at once", "run it for ``tile`` positions at a time"),
        s * tile: ("the sequences are tiled, not their positions", "split dimension 0"),
        -(-s // tile) * b: ("there are ``tile`` tiles", "each has ``tile`` positions, so split, not chunk"),
    }
    for when, noted in passes.items():
        few = "four tensors [tile, b, f] and three of each input are enough"
        cause, repair = tiled.get(noted.elements // f, (few, ""))
        r.see_peak(when, noted, enough, repair, cause)
    matmuls = -(-flops.get_total_flops() // (2 * s * b * h * f))
    words = "forward and backward run {found} matmuls of s·b·h·f where {enough} are enough"
    r.see_cost(words, max(8, matmuls), "two in forward, two again and four gradients in backward")
    # The same row in each of 300 tiles: in bfloat16, 256 of them and one more are 256.
    alike = [x[0, 0].abs().expand(300, 1, h), up.abs(), down.abs()]
    half = [tensor.bfloat16().requires_grad_() for tensor in alike]
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    F.linear(F.gelu(F.linear(exact[0], exact[1])), exact[2]).sum().backward()
    r["tiled_mlp"](*half, 1).sum().backward()
    for name, own_weight, weight in zip(("up", "down"), half[1:], exact[1:]):
        off = (grad_of(own_weight) - grad_of(weight)).abs().max() / grad_of(weight).abs().max()
        words = f"with 300 tiles in bfloat16, the gradient of {name} is {{found}} % off"
        r.see_cost(words, max(2, math.ceil(100 * off)), f"add up the tiles in wide({name})")
