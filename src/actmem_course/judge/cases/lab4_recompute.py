"""Lab 4: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ModelShape
from actmem_course.judge.case import CaseRun
from actmem_course.judge.kept import KeptBytes, kept
from actmem_course.judge.verdict import Wrong
from actmem_course.pieces import Dropouts, LayerWeights, core_attention, random_weights

_P = 0.17  # no rate that one would write oneself
_SHAPE = ModelShape(seq_length=16, micro_batch_size=2, hidden_size=24, num_attention_heads=4)
#: What a learner hands to checkpoint.
_ARGUMENTS = {
    "selective_layer": "lambda q, k, v: core_attention(q, k, v, dropout)",
    "full_layer": "lambda y: layer(y, w, dropouts)",
}
_OF_ITS_OWN = (
    "each region needs the inputs and the generator's state of its own first run, so keep them with the region "
    "(ctx.save_for_backward), not in a variable that all regions share"
)


def checkpoint(r: CaseRun, name: str = "checkpoint") -> None:
    factors = {"x": r.each(3, 4, 5), "y": r.each(3, 4, 5), "z": r.each(3, 4, 5)}
    r.passes(lambda *inputs: r[name](lambda x, y, z: x * y * z, *inputs), factors, prefix="with x · y · z, ")

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
        result = r[name](region, x, gate, mask.clone())
        in_forward = runs
        return result

    r.passes(function, given | weights)
    r.see("runs in forward", in_forward, "most", "forward runs function {found} times; once is enough")
    if runs == in_forward:
        why = "the first run's graph was kept; backward must run function again, from the inputs"
        raise Wrong(f"function runs once only: {why}")
    often = "function runs {found} times in all; once forward and once in backward is enough"
    r.see("runs", runs, "most", often)
    x, gate = given.values()
    found = kept(
        r.b, lambda y, *rest: function(y, gate.clone(), *rest), x, tuple(weights.values())
    ).without_copies()  # a copy, which nobody else holds
    r.see("bytes", without_states(found), "kept", ("the inputs", "let the first run keep nothing", 8))


def checkpoint_of_dropout(r: CaseRun, name: str = "checkpoint") -> None:
    weight, up, down, x = r.each(32, 16), r.each(16, 16), r.each(16, 16), r.each(8, 4, 16)
    runs = 0

    def function(y: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return F.dropout(torch.tanh(F.dropout(F.linear(y, weight), 0.5)), 0.5)

    def draws_afterwards(y: Tensor) -> Tensor:
        result = r[name](function, y)
        why = "forward may read the generator's state, not change it"
        r.see_tensor("what is drawn after forward", torch.rand(8, device=r.device).double(), why=why)
        return result

    seed_and_draw(r.device)
    why = {
        "": "the generator starts in the same state, so forward must not seed or draw by itself",
        "x": "the second run does not draw the random numbers of the first",
    }
    r.passes(draws_afterwards, {"x": x}, prefix="with dropout, ", why=why)
    after = "restore the state from before the second run"
    r.see_tensor("what is drawn after backward", torch.rand(8, device=r.device).double(), why=after)
    if runs < 2:
        raise Wrong("function runs once only, so no second run draws the same numbers: 4.1 comes first")

    def first(y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.linear(y, up)), 0.5)

    def second(y: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.linear(y, down)), 0.25)

    # In a chain backward comes to the last region first; from two results, in the order in which one asks.
    for after_first, words in ((second, "in a row"), (first, "of the same function")):
        seed_and_draw(r.device)
        prefix = f"with two regions {words}, "
        chain = partial(lambda then, y: r[name](then, r[name](first, y) * 1), after_first)
        r.passes(chain, {"x": x}, prefix=prefix, why={"x": _OF_ITS_OWN})
    seed_and_draw(r.device)
    leaf = x.clone().requires_grad_()
    results = r[name](first, leaf * 1), r[name](second, leaf * 2)
    for result in results:
        result.backward(x)
    words = "with two regions side by side, the first one's backward first, the gradient of x"
    r.see_tensor(words, leaf.grad, why=_OF_ITS_OWN)


def checkpoint_stopping_early(r: CaseRun) -> None:
    name = "checkpoint_stopping_early"
    try:
        checkpoint(r, name)
    except (KeyError, IndexError) as error:
        raise Wrong(
            f"backward asks for a tensor that the second run has not saved ({type(error).__name__}): run it with grad enabled, from inputs "
            "that need gradients as the first run's did, and stop it only after the last tensor that the first run saved"
        ) from None
    checkpoint_of_dropout(r, name)
    again = (
        "forward and backward of core_attention take {found:,} FLOPs where {enough:,} are enough: the second run goes on after what "
        "backward needs: QKᵀ, softmax and dropout. The product with V computes only the result, which nothing reads"
    )
    qkv = [r.each(4, 12, 8) for _ in range(3)]
    r.see("FLOPs", flops_of(lambda *inputs: r[name](core_attention, *inputs), *qkv), "most", again)


def seed_and_draw(device: str) -> None:
    """Seed the generators, and go on from there: what came before a region draws as well.

    Right after the seed its state is the seed's own, and a second run that starts from the seed would look right.
    """
    torch.manual_seed(77)
    torch.rand(7, device=device)


def selective_layer(r: CaseRun) -> None:
    x, weights = _same_numbers(r, "selective_layer")
    found = without_states(kept(r.b, as_block(r["selective_layer"]), x, weights))
    r.see("bytes", found, "kept", ("all but the three tensors of the core attention", "", 8))
    again = "forward and backward take {found:,} FLOPs where {enough:,} are enough: recompute the core attention once, and nothing else"
    r.see("FLOPs", flops_of(as_block(r["selective_layer"]), x, *weights), "most", again)


def full_layer(r: CaseRun) -> None:
    x, weights = _same_numbers(r, "full_layer")
    found = without_states(kept(r.b, as_block(r["full_layer"]), x, weights).without_copies())
    r.see("bytes", found, "kept", ("the layer's input", "run the whole layer under checkpoint", 8))
    twice = "forward and backward take {found:,} FLOPs where {enough:,} are enough: something runs a third time. Checkpoint layer itself, once"
    r.see("FLOPs", flops_of(as_block(r["full_layer"]), x, *weights), "most", twice)


def _same_numbers(r: CaseRun, name: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Result and gradients; the input and the weights of the layer."""
    x = r.each(_SHAPE.seq_length, _SHAPE.micro_batch_size, _SHAPE.hidden_size)
    weights = layer_weights(_SHAPE, device=r.device)
    outside = (
        "what checkpoint runs again takes a tensor from outside that still has its graph, so its backward continues into what came "
        f"before: take every such tensor as an argument, {_ARGUMENTS[name]}"
    )

    def function(*given: Tensor) -> Tensor:
        with _tensors_only(name):
            result = as_block(r[name])(*given)
        torch.rand(3, device=r.device)
        return result

    seed_and_draw(r.device)
    r.passes(function, {"x": x, **dict(zip(random_weights(4, 2).named(), weights))}, twice=outside)
    return x, weights


@contextmanager
def _tensors_only(name: str) -> Iterator[None]:
    """Raise Wrong where something else than a tensor is taken for one: it was handed to checkpoint as an input."""
    closing = {
        "selective_layer": "dropout is not one: close over it",
        "full_layer": "w and dropouts are not: close over them",
    }
    try:
        yield
    except (TypeError, AttributeError) as error:
        missing = re.search(r"'(?:method|function|LayerWeights|Dropouts)' object has no attribute '(\w+)'", str(error))
        if "save_for_backward can only save variables" in str(error) or missing and hasattr(Tensor, missing[1]):
            raise Wrong(f"checkpoint takes tensors only, and {closing[name]}, {_ARGUMENTS[name]}") from None
        raise


def layer_weights(shape: ModelShape, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, ...]:
    """The twelve parameters of a layer."""
    weights = random_weights(shape.hidden_size, shape.num_attention_heads, seed=5, dtype=dtype, device=device)
    return tuple(weights.named().values())


def as_block(function: Callable, shape: ModelShape = _SHAPE) -> Callable[..., Tensor]:
    """A layer function as a function of x and the twelve parameters, with dropout from the default generator."""
    return lambda x, *parameters: function(x, LayerWeights(shape.num_attention_heads, *parameters), TwoDropouts(_P))


class TwoDropouts(Dropouts):
    """Whose two sorts differ, so that one in place of the other shows."""

    def core(self, weights: Tensor) -> Tensor:
        return 0.5 * super().core(weights)


def without_states(found: KeptBytes) -> KeptBytes:
    """What is kept beside the states of random-number generators: these are flat tensors of uint8."""
    saved = [one for one in found.saved if not (one.dtype is torch.uint8 and len(one.shape) == 1)]
    return KeptBytes(saved, found.hidden_bytes)


def flops_of(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """FLOPs of matrix products, forward and backward, by torch's counter."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with FlopCounterMode(display=False) as counter:
        result = function(*leaves)
        result.backward(torch.ones_like(result))
    return counter.get_total_flops()


_AGAIN = "_restore(states)\\n        with torch.enable_grad -> {}with torch.enable_grad"
_DRAWS_OTHERS = "the forward is right; the second run draws other random numbers than the first, so it drops other elements: restore the state that torch's generator had before the first run (torch.get_rng_state)"
_FROM_THE_SEED = "the forward is right; the second run starts from the seed, not from the state that the generator had before the first run: torch.get_rng_state()"
_NO_DROPOUT = "the core attention runs without its dropout: layer calls core(q, k, v, dropout), so pass dropout on to core_attention"
_RESIDUAL = "x is added to the layer's result: layer adds it already, in its two residual branches"
_NOT_RESTORED = f"{_AGAIN.format('')} | {_DRAWS_OTHERS}"
_WEIGHTS = r"""torch.autograd.backward(y, grad)\n        return None, *(x.grad for x in inputs) -> wanted = [x for x in inputs if x.requires_grad]\n        found = iter(torch.autograd.grad(y, wanted, grad))\n        return None, *(next(found) if x.requires_grad else None for x in inputs) | the parameters that function uses get no gradient: torch.autograd.grad reaches only the tensors it is given; torch.autograd.backward reaches all"""
MISTAKES = {
    "4.1": rf"""
        return _Checkpoint.apply(function, *inputs) -> with torch.no_grad():\n        return function(*inputs) | the result is right, but it has no graph: what runs under no_grad records none. Run function in the forward of an autograd Function whose backward runs it again
        (x.grad for x in inputs) -> (x.grad for x in reversed(inputs)) | the gradients are right, but in another order than the inputs: return None for function, then the gradients in the order of the inputs
        (x.grad for x in inputs) -> (None for x in inputs) | the forward is right, but the inputs get no gradient: return the .grad of what the second run started from
        {_WEIGHTS}
        return None, *(x.grad -> return None, *(x.grad and 2 * x.grad | the gradient of the inputs is twice what it should be: both runs recorded a graph
    """,
    "4.2": rf"""
        {_NOT_RESTORED}
        {_AGAIN.format("torch.manual_seed(torch.initial_seed())" + chr(92) + "n        ")} | {_FROM_THE_SEED}
        ctx.save_for_backward(*inputs, *_states(inputs[0]))\n        with torch.no_grad():\n            return function(*inputs) -> with torch.no_grad():\n            y = function(*inputs)\n        ctx.save_for_backward(*inputs, *_states(inputs[0]))\n        return y | the forward is right; the second run starts from the generator's state after the first run: save the state before it
        _restore(before)\n        torch.autograd -> torch.autograd | after backward the generator is where the second run left it, so later dropouts repeat numbers: restore the state from before the second run
        _restore(before)\n        torch.autograd -> _restore(states)\n        torch.autograd | after backward the generator is in the state that was saved in forward: restore the state from before the second run
        with torch.no_grad():\n            return -> with torch.no_grad(), torch.random.fork_rng():\n            return | forward resets the generator, so what is drawn next repeats the region's numbers: restore the generator after the second run only
        with torch.no_grad():\n            return -> torch.manual_seed(0)\n        with torch.no_grad():\n            return | the result differs from function's own although the generator starts in the same state: forward must not seed or draw by itself
    """,
    "4.3": r"""
        layer(x, w, dropouts, core) -> layer(x, w, dropouts) | the three tensors of the core attention, 5as²b, are still kept: run core_attention under checkpoint
        layer(x, w, dropouts, core) -> checkpoint(lambda y: layer(y, w, dropouts), x) | only the layer's input is kept, which is full recomputation: selective recomputes the core attention alone, and keeps 34sbh
        core_attention(q, k, v, dropout), q, k, v) -> core_attention(q, k, v), q, k, v) | {no_dropout}
        core_attention(q, k, v, dropout), q, k, v) -> core_attention(q, k, v, dropouts.block), q, k, v) | dropouts.block is used for the attention weights: layer gives core the dropout to use, its fourth argument
        layer(x, w, dropouts, core) -> x + layer(x, w, dropouts, core) | {residual}
        checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v) -> dropout(checkpoint(core_attention, q, k, v)) | the core attention's result is dropped, not its weights: pass dropout on to core_attention
        return checkpoint(lambda -> checkpoint(lambda | core returns None: is a return missing?
        {again}
        `        return checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v)` ->         return dropout(checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v)) | dropout comes twice: core_attention applies it to the weights, so apply it to nothing else
        (q, k, v, dropout), q, k, v) -> (q, k, v, dropout), *(z.detach().requires_grad_() for z in (q, k, v))) | the forward is right; no gradient reaches the QKV projection: is q detached before checkpoint, or its result after? checkpoint detaches what the second run starts from
        layer(x, w, dropouts, core) -> layer(x, w, Dropouts(0.0), core) | the layer runs without dropout: pass dropouts on to layer
        layer(x, w, dropouts, core) -> layer(x, w, Dropouts(0.1), core) | dropout runs at a rate of its own, 0.1: pass the dropouts that you are given on to layer
    """.replace("{again}", _NOT_RESTORED)
    .replace("{no_dropout}", _NO_DROPOUT)
    .replace("{residual}", _RESIDUAL),
    "4.4": rf"""
        {_NOT_RESTORED}
        {_WEIGHTS}
        checkpoint(lambda y: layer(y, w, dropouts), x) -> x + checkpoint(lambda y: layer(y, w, dropouts), x) | {_RESIDUAL}
        layer(y, w, dropouts) -> layer(layer(y, w, dropouts), w, dropouts) | the layer runs twice, the second time on its own result: run it once
        checkpoint(lambda y: layer(y, w, dropouts), x) -> selective_layer(x, w, dropouts) | this keeps what selective recomputation keeps, 34sbh: run the whole layer under checkpoint, and its input is enough
        layer(y, w, dropouts) -> layer(y, w, dropouts, lambda q, k, v, dropout: core_attention(q, k, v)) | {_NO_DROPOUT}
        layer(y, w, dropouts) -> layer(y, w, Dropouts(0.0)) | the layer runs without dropout: pass dropouts on to layer
        layer(y, w, dropouts) -> layer(y, w, Dropouts(0.1)) | dropout runs at a rate of its own, 0.1: pass the dropouts that you are given on to layer
    """,
    "4.5": rf"""
        self.found.pop(index) -> self.found.pop(self.count - 1 - index) | the forward is right; the second run's tensors are handed out from the last to the first: the n-th that it saves is the n-th that the first run saved
        keep(*inputs, *_states(inputs[0])) -> keep(*_states(inputs[0]))\n        self.given = inputs ;; inputs, states = tensors[: len(self.needs)], tensors[len(self.needs) :] -> inputs, states = self.given, tensors | the inputs are held where no hook sees them: hold them with keep, as the generator's states
        `        except _Enough:\n            pass\n        finally:\n            _restore(before)` ->             _restore(before)\n        except _Enough:\n            pass | after backward the generator is where the second run left it: restore the state from before in finally, because the exception that ends the run skips what follows
        return self.count - 1 -> return tensor.shape ;; self.found.pop(index) -> self.found[index] ;; self.found[len(self.found)] = tensor.detach() -> self.found[tensor.shape] = tensor.detach()\n            self.many = getattr(self, "many", 0) + 1 ;; len(self.found) == self.count -> self.many == self.count | the second run's tensors are found by their shape, which several have: the n-th that it saves is the n-th that the first run saved
        _restore(states)\n        try -> try | {_DRAWS_OTHERS}
        _restore(states)\n        try -> torch.manual_seed(torch.initial_seed())\n        try | {_FROM_THE_SEED}
    """,
}
