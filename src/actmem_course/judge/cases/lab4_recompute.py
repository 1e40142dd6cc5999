"""Lab 4: its cases, the functions that test a learner's answers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ModelShape
from actmem_course.judge.case import CaseRun
from actmem_course.judge.verdict import Fault, Wrong, mend
from actmem_course.reference_layer import Dropouts, LayerWeights, random_weights

_P = 0.17  # no rate that one would write oneself
_SHAPE = ModelShape(seq_length=16, micro_batch_size=2, hidden_size=24, num_attention_heads=4)
#: What a right answer gives to checkpoint, by exercise.
_ARGUMENTS = {
    "selective_layer": "lambda q, k, v: core_attention(q, k, v, dropout)",
    "full_layer": "lambda y: layer(y, w, dropouts)",
}
_OF_ITS_OWN = mend(
    "save them with the region (ctx.save_for_backward), not in a variable that all regions share",
    "each region needs the inputs and the generator's state of its own first run",
)


def checkpoint(r: CaseRun) -> None:
    factors = {factor: r.each(3, 4, 5) for factor in "xyz"}
    r.observe(lambda *inputs: r["checkpoint"](lambda x, y, z: x * y * z, *inputs), factors, prefix="with x · y · z, ")

    given = {"the first input": r.each(16, 4, 64), "the second input": r.each(16, 4, 1)}
    weights, mask = {"a parameter": r.each(256, 64), "another parameter": r.each(64, 256)}, r.each(16, 4, 256) > 0
    runs, in_forward = 0, 0

    def function(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        nonlocal runs, in_forward

        def region(x: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return F.linear(torch.tanh(F.linear(x, up) * gate) * mask, down) + x

        runs = 0
        result = r["checkpoint"](region, x, gate, mask.clone())
        in_forward = runs
        return result

    r.observe(function, given | weights)
    r.see_cost("forward runs function {found} times", in_forward, "once is enough")
    if runs == in_forward:
        again = "run function again in backward, from the inputs"
        raise Wrong("function runs once only", again, "the first run recorded a graph")
    r.see_cost("function runs {found} times in all", runs, "once in forward and once in backward is enough")
    x, gate = given.values()  # a copy of gate, which nobody else holds
    r.saves(
        lambda y, *rest: function(y, gate.clone(), *rest), x, *weights.values(),
        what="the inputs", repair="let the first run save nothing", itself=True,
    )  # fmt: skip


def checkpoint_of_dropout(r: CaseRun) -> None:
    weight, up, down, x = r.each(32, 16), r.each(16, 16), r.each(16, 16), r.each(8, 4, 16)
    runs = 0

    def function(y: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return F.dropout(torch.tanh(F.dropout(F.linear(y, weight), 0.5)), 0.5)

    def draws_afterwards(y: Tensor) -> Tensor:
        result = r["checkpoint"](function, y)
        read = "forward may read the generator's state, not change it"
        r.see_tensor("what is drawn after forward", torch.rand(8, device=r.device).double(), read)
        return result

    seed_and_draw(r.device)
    advice = {
        "": mend("forward must not seed or draw by itself", "the generator starts in the same state"),
        "x": mend(
            "restore the state that torch's generator had before the first run (torch.get_rng_state)",
            "the second run does not draw the random numbers of the first",
        ),
    }
    r.observe(draws_afterwards, {"x": x}, prefix="with dropout, ", advice=advice)
    after = "restore the state from before the second run"
    r.see_tensor("what is drawn after backward", torch.rand(8, device=r.device).double(), after)
    if runs < 2:
        raise Wrong("function runs once only", "4.1 comes first", "no second run draws the same numbers")

    def first(y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.linear(y, up)), 0.5)

    def second(y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.linear(y, down)), 0.25)

    # In a chain backward reaches the last region first; from two results it reaches them in the order of the calls.
    for after_first, words in ((second, "in a row"), (first, "of the same function")):
        seed_and_draw(r.device)
        prefix = f"with two regions {words}, "
        chain = partial(lambda then, y: r["checkpoint"](then, r["checkpoint"](first, y) * 1), after_first)
        r.observe(chain, {"x": x}, prefix=prefix, advice={"x": _OF_ITS_OWN})
    seed_and_draw(r.device)
    leaf = x.clone().requires_grad_()
    for result in [r["checkpoint"](first, leaf * 1), r["checkpoint"](second, leaf * 2)]:
        result.backward(x)
    words = "with two regions side by side, the first one's backward first, the gradient of x"
    r.see_tensor(words, leaf.grad, _OF_ITS_OWN, gradient_of="x")


def seed_and_draw(device: str) -> None:
    """Seed torch's default random generators, and draw a few numbers on a device.

    The draw stands for operations before a checkpoint.  Without this draw, a recomputation that wrongly restarts from
    the seed would draw the right numbers by accident.

    Args:
        device: "cpu" or "cuda".
    """
    torch.manual_seed(77)
    torch.rand(7, device=device)


def selective_layer(r: CaseRun) -> None:
    again = mend("recompute the core attention once, and nothing else")
    _see_layer(r, "selective_layer", again, what="all but the three tensors of the core attention")


def full_layer(r: CaseRun) -> None:
    again = mend("checkpoint layer itself, once", "something runs a third time")
    repair = "run the whole layer under checkpoint"
    _see_layer(r, "full_layer", again, what="the layer's input", repair=repair, itself=True)


def _see_layer(r: CaseRun, name: str, again: Fault, **saves: Any) -> None:
    """Note a layer function's result, gradients, saved bytes and FLOPs.

    Args:
        r: the run of the case.
        name: the function.
        again: what to tell a learner if too much is recomputed.
        saves: further arguments of ``CaseRun.saves``.
    """
    x = r.each(_SHAPE.seq_length, _SHAPE.micro_batch_size, _SHAPE.hidden_size)
    named = random_weights(_SHAPE.hidden_size, _SHAPE.num_attention_heads, seed=5, device=r.device).named()
    outside = Fault(
        "backward comes more than once to what made the inputs",
        f"take every such tensor as an argument, {_ARGUMENTS[name]}",
        "what checkpoint recomputes takes a tensor from outside that still has its graph, so its backward continues "
        "into what came before",
    )

    def function(*given: Tensor) -> Tensor:
        result = as_block(r[name])(*given)
        torch.rand(3, device=r.device)
        return result

    seed_and_draw(r.device)
    given = {"x": x, **named}
    r.observe(function, given, fault_if_reached_twice=outside)
    r.saves(as_block(r[name]), x, *named.values(), **saves)
    with FlopCounterMode(display=False) as counter:
        as_block(r[name])(*(tensor.clone().requires_grad_() for tensor in given.values())).sum().backward()
    words = "forward and backward take {found:,} FLOPs where {enough:,} are enough"
    r.see_cost(words, counter.get_total_flops(), again.repair, again.cause)


def as_block(function: Callable) -> Callable[..., Tensor]:
    """Convert a function ``layer(x, weights, dropouts)`` to a function of tensors only: x and the twelve parameters.

    ``CaseRun.observe`` and ``CaseRun.saves`` take such functions.  The dropouts draw from torch's default generator.

    Args:
        function: such as the learner's ``full_layer``.
    """
    return lambda x, *parameters: function(x, LayerWeights(_SHAPE.num_attention_heads, *parameters), TwoDropouts(_P))


class TwoDropouts(Dropouts):
    """Dropouts whose ``core`` scales differently from ``block``, so that a test sees if the two are swapped."""

    def core(self, weights: Tensor) -> Tensor:
        return 0.5 * super().core(weights)
