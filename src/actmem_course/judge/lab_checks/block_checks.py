"""How a learner's linear, block or layer is judged: the result, every gradient, what is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.compare import check_tensor, close, factor, summed, times
from actmem_course.judge.lab_checks.blocks import Block, Gradients
from actmem_course.judge.lab_checks.exchanged import OWN_PART, Parts, everything_made, explain_exchange
from actmem_course.judge.lab_checks.steps import exchanging
from actmem_course.judge.passes import Passes, check_collectives, check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


def check_block(b: Bench, block: Block, function: Callable, *rest: object) -> Passes:
    """Raise Wrong unless ``function(x, *weights, *rest)`` does what the block does."""
    passes = check_result(b, block, function, *rest)
    check_gradients(b, block, passes)
    return passes


def check_result(b: Bench, block: Block, function: Callable, *rest: object) -> Passes:
    """Raise Wrong unless the result and forward's exchanges are right."""
    results = [result for result, _ in block.run()]
    passes = run_passes(
        b,
        function,
        {"x": block.x[b.rank], **block.weights[b.rank]},
        rest,
        expected=results[b.rank],
        upstream=block.upstream[b.rank],
        explain=lambda found: _explain(found, results, b.rank, block.returns, "the result is the same on every rank"),
        more=block.mistakes(b.rank),
        exchanges=block.exchanges()[0],
    )
    if b.size > 1:  # before gradients: a wrong way out of a block shows here first
        check_collectives("forward", passes.forward.collectives, block.exchanges()[0])
    return passes


def check_gradients(
    b: Bench, block: Block, passes: Passes, partial: Collection[str] = (), again: Sequence[Collective] = ()
) -> None:
    """Raise Wrong unless gradients and backward's exchanges are right.

    partial: weights whose gradients are terms of a sum over the ranks.  again: what backward exchanges besides.
    """
    try:
        _check_each(b, block, passes, [gradients for _, gradients in block.run()], partial)
    except Wrong as wrong:
        diagnosis = block.explain(b.rank, passes)
        if diagnosis is None:
            raise
        raise Wrong(f"the forward is right, the gradients are not: {diagnosis}", [str(wrong)]) from None
    if b.size > 1:
        check_collectives("backward", passes.backward.collectives, [*block.exchanges()[1], *again])


def _check_each(b: Bench, block: Block, passes: Passes, right: Sequence[Gradients], partial: Collection[str]) -> None:
    entry = block.program[0].operator
    for name, own in right[b.rank].items():
        parts = [gradients[name] for gradients in right]
        replicated = b.size > 1 and name != "x" and all(close(part, own) for part in parts)
        if name in partial:
            _check_partial(b, passes, name, summed(parts))
            continue
        if replicated:
            _check_bias_everywhere(b, passes.gradients[name], name)
        mistakes = {}
        if name != "x" and len(block.x[0]) < len(block.upstream[0]):
            why = "is added to all tokens" if name == "bias" else "meets all tokens, so x must be gathered again"
            of_own = block.run(upstream=block.seen_by(b.rank))[b.rank][1][name]
            mistakes[f"the gradient of {name} comes from this rank's tokens only, and the {name} {why}"] = of_own

        def explain(found: Tensor, name: str = name, parts: Parts = parts) -> list[str]:
            if name == "x" and entry and entry.backward.kind:
                before = [gradients["x"] for _, gradients in block.inside().run()]
                return explain_exchange(found, before, b.rank, entry.backward, entry.in_backward)
            alone = f"each rank's {name} is its own, so its gradient needs no exchange"
            words = _explain(found, parts, b.rank, alone, f"every rank has the whole gradient of {name} already")
            return words or _explain_gathered(block, b.rank, name, found)

        check_gradient(passes, name, own, mistakes, b.size, explain)


def _explain_gathered(block: Block, rank: int, name: str, found: Tensor) -> list[str]:
    """A gradient of a weight from another x than the one that the operator at the entry gives."""
    entry, fits = block.program[0].operator, list[str]()
    if not entry or not entry.forward.kind:
        return fits
    for made in everything_made(len(block.x), block.x[0].dim()):
        try:
            gradients = block.run([exchanging(replace(entry, forward=made)), *block.program[1:]])[rank][1]
        except (RuntimeError, IndexError):  # its shapes don't fit
            continue
        if close(gradients[name], found):
            fits.append(f"comes of x as {made.words}; it should come of {entry.forward.words}")
    return fits


def _explain(found: Tensor, parts: Parts, rank: int, cut: str, replicated: str) -> list[str]:
    """How ``found`` comes of the ranks' right tensors; cut, replicated: what to say if those differ, and if not."""
    if any(not close(part, parts[0]) for part in parts):
        return [] if not cut else explain_exchange(found, parts, rank, OWN_PART, cut)
    ratio = factor(found, parts[rank]) if found.shape == parts[rank].shape else None
    return [f"is {times(ratio, len(parts))} what it should be: {replicated}"] if ratio and len(parts) > 1 else []


def _check_partial(b: Bench, passes: Passes, name: str, whole: Tensor) -> None:
    """Raise Wrong unless the ranks' gradients add up to the whole, or each has it already."""
    found = b.gather(passes.gradients[name])
    if any(gradient is None for gradient in found):
        _check_bias_everywhere(b, passes.gradients[name], name)
        raise Wrong(f"the forward is right, but {name} gets no gradient")
    if b.size == 1 or not close(found[b.rank], whole):
        check_tensor(f"the forward is right; the ranks' gradients of {name}, added up,", sum(found), whole, t=b.size)


def _check_bias_everywhere(b: Bench, gradient: Tensor | None, name: str) -> None:
    """Raise Wrong if only some ranks use a bias that is the same on every rank.  gradient: this rank's."""
    users = [rank for rank, used in enumerate(b.gather(gradient is not None and bool(gradient.any()))) if used]
    if 0 < len(users) < b.size:
        ranks = f"rank{'s' * (len(users) > 1)} {', '.join(map(str, users))}"
        raise Wrong(
            f"the forward is right, but {name} is used on {ranks} only: the other ranks' {name} gets no gradient, and the copies "
            "drift apart. Add it on every rank, after the sum over the ranks"
        )
