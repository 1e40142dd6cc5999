"""Lab 6's training step as named steps on all ranks at once, from which its mistakes are made.

A step is linear in what one backward of each microbatch's loss gives on each rank, so these gradients are all it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmem_course.judge.lab_checks.mutations import StepOf, mutations

RankGradients = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingStart:
    """What a step begins with.

    of_loss: by microbatch and rank, what a backward of its loss adds.  left: by rank, what the step before left.
    partial, cut: parameters whose gradients need the other ranks', and those of which each rank has a part.
    """

    of_loss: list[list[RankGradients]]
    left: list[RankGradients]
    partial: set[str]
    cut: set[str]
    max_norm: float


class Training:
    """The ranks between two steps, by rank.  moved: what the optimizer took, over its rate."""

    def __init__(self, start: TrainingStart):
        self.start, self.gradients, self.norms = start, start.left, [0.0] * len(start.left)
        self.moved = [{name: torch.zeros_like(g) for name, g in own.items()} for own in start.left]

    def map(self, function: Callable[[int, str, Tensor], Tensor]) -> None:
        """Put ``function(rank, name, gradient)`` in place of each gradient."""
        ranks = enumerate(self.gradients)
        self.gradients = [{name: function(rank, name, g) for name, g in own.items()} for rank, own in ranks]

    def limit(self, norm: float) -> float:
        """By what a gradient of this norm is scaled to max_norm."""
        return self.start.max_norm / norm if norm else 1.0


Change = Callable[[Training], None]


def in_turn(*changes: Change) -> Change:
    """Several as one."""

    def change(state: Training) -> None:
        for one in changes:
            one(state)

    return change


def backward(microbatch: int, scale: float) -> Change:
    """Add a microbatch's gradients."""
    return lambda state: state.map(lambda rank, name, g: g + scale * state.start.of_loss[microbatch][rank][name])


def summed_over_ranks(scale: float = 1.0, all_of_them: bool = False) -> Change:
    """Sum the partial gradients, or all, over the ranks."""

    def change(state: Training) -> None:
        before, which = state.gradients, state.gradients[0] if all_of_them else state.start.partial
        state.map(lambda rank, name, g: scale * torch.stack([r[name] for r in before]).sum(0) if name in which else g)

    return change


def norms(state: Training, of_own_part: bool = False) -> None:
    """The norm of the whole gradient, as each rank sees it; of_own_part: of what the rank has of it."""
    squares = [{name: g.square().sum().item() for name, g in own.items()} for own in state.gradients]
    cut = [sum(own[name] for name in state.start.cut) for own in squares]
    whole = [sum(own.values()) - of_cut for own, of_cut in zip(squares, cut)]
    state.norms = [math.sqrt((own if of_own_part else sum(cut)) + rest) for own, rest in zip(cut, whole)]


def scaled(by: Callable[[Training, int, Tensor], Tensor]) -> Change:
    return lambda state: state.map(lambda rank, name, g: by(state, rank, g))


scale_down = scaled(lambda state, rank, g: g * min(1.0, state.limit(state.norms[rank])))


def scale_by_own_norm(more: float) -> Change:
    """Scale every parameter's gradient by itself.  more: what is added to a norm, against a division by 0."""
    return scaled(lambda state, rank, g: g * min(1.0, state.limit(g.norm().item() + more)))


def take_step(state: Training, sign: int = 1) -> None:
    state.moved = [{n: own[n] + sign * g for n, g in new.items()} for own, new in zip(state.moved, state.gradients)]


#: The norm to scale by; and what to say where reduce_partial_gradients is missing or elsewhere.
_WHOLE = "each by max_norm / norm, with the norm of the whole, complete gradient (gradient_norm)"
_REDUCE = (
    "between the last backward and gradient_norm: some parameters saw only this rank's tokens, and reduce_partial_gradients "
    "sums their gradients over the ranks, once, after the last backward; only then has gradient_norm the norm of the whole, complete gradient"
)


def training_program(n: int) -> list[StepOf]:
    """The right step with ``n`` microbatches."""
    steps: list[tuple[str, Change, str]] = [
        ("optimizer.zero_grad()", lambda state: state.map(lambda rank, name, g: 0 * g), "before the first backward"),
        *((f"the backward of microbatch {i}", backward(i, 1 / n), "") for i in range(n)),
        ("reduce_partial_gradients", summed_over_ranks(), _REDUCE),
        ("gradient_norm", norms, "after reduce_partial_gradients"),
        ("the scaling to max_norm", scale_down, "between gradient_norm and optimizer.step()"),
        ("optimizer.step()", take_step, "at the end"),
    ]
    return [StepOf(name, do, place=place) for name, do, place in steps]


def training_mistakes(n: int, t: int) -> Iterator[tuple[str, Sequence[StepOf]]]:
    """Diagnosis and program for what learners do; then for every step that is dropped, repeated, moved."""
    right = training_program(n)
    zero, *backwards, reduce, norm, scaling, step = (one.name for one in right)
    reducing = summed_over_ranks()

    def each(scale: float, *then: Any) -> dict[str, Any]:
        return {name: in_turn(backward(i, scale), *then) for i, name in enumerate(backwards)}

    def only(name: str, scale: float) -> dict[str, Any]:
        return {other: None for other in backwards} | {name: each(scale)[name]}

    once = f"reduce_partial_gradients runs after each backward: it belongs {_REDUCE}"
    last = "only the last microbatch counts: zero_grad belongs before the first, so that gradients add up"
    as_data = (
        "gradients of parameters that are cut are added up over the ranks: each rank has another part of the weight, "
        "and its gradient is complete; only reduce_partial_gradients remains to be called (this is not a data-parallel group)"
    )
    own_norm = f"each parameter's gradient is scaled by its own norm; scale all of them down {_WHOLE}"
    each_clipped = "the gradient is clipped after each microbatch; clip once, after the last, what they add up to"
    variants: list[tuple[str, Mapping[str, Any]]] = [
        ("no parameter has changed: is optimizer.step() missing?", {step: None}),
        ("the gradients of the step before are still there: optimizer.zero_grad() is missing", {zero: None}),
        (f"steps are {n} times too long: the loss is the mean over the {n} microbatches, so divide each by their number", each(1)),
        (f"steps are 1/{n} of what they should be: the losses are divided by the number of microbatches twice", each(1 / n**2)),
        ("steps go the wrong way", {step: lambda state: take_step(state, -1)}),
        *((last, only(backwards[-1], scale)) for scale in (1 / n, 1)),
        *(("only the first microbatch counts", only(backwards[0], scale)) for scale in (1 / n, 1)),
        *((once, {**each(1 / n, reducing), **at_the_end}) for at_the_end in ({}, {reduce: None})),
        *((as_data, {reduce: in_turn(*before, summed_over_ranks(scale, all_of_them=True))})
          for scale in (1, 1 / t) for before in ((), (reducing,)) if t > 1),
        ("gradients are not scaled down to max_norm before optimizer.step()", {scaling: None}),
        ("gradients are scaled up to max_norm; scale them only if the norm is larger than max_norm",
         {scaling: scaled(lambda state, rank, g: g * state.limit(state.norms[rank]))}),
        (f"gradients are scaled by the norm of this rank's parameters, so ranks scale differently; scale {_WHOLE}",
         {norm: lambda state: norms(state, of_own_part=True)}),
        (f"each element of a gradient is clipped to max_norm by itself; scale the gradients down {_WHOLE}",
         {scaling: scaled(lambda state, rank, g: g.clamp(-state.start.max_norm, state.start.max_norm))}),
        *((own_norm, {scaling: scale_by_own_norm(more)}) for more in (0, 1e-6)),
        *((each_clipped, {**each(1 / n, norms, scale_down), **at_the_end}) for at_the_end in ({}, {scaling: None})),
    ]  # fmt: skip
    return mutations(right, variants)


def take_training_steps(program: Sequence[StepOf], start: TrainingStart) -> Training:
    """What has become of the ranks after the program's steps."""
    state = Training(start)
    for step in program:
        step.do(state)
    return state
