"""The linears and blocks of labs 2 and 3 as steps, and a search for the mistake that gives a learner's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import close, summed
from actmem_course.judge.lab_checks.steps import (
    Program,
    StepOf,
    Variants,
    f_bar_of_all,
    f_of_all,
    g_bar_of_all,
    g_of_all,
    mutations,
    on_each,
    run_steps,
)
from actmem_course.judge.passes import Passes
from actmem_course.judge.verdict import Wrong

Weights = Mapping[str, Tensor]

F_STEP = StepOf("f", f_of_all, place="at the entry, once")
F_BAR_STEP = StepOf("f_bar", f_bar_of_all, place="right after the row-parallel product")
G_STEP = StepOf("g", g_of_all, place="at the entry, once")
G_BAR_STEP = StepOf("g_bar", g_bar_of_all, "g_bar", place="right after the row-parallel product")


@dataclass(frozen=True)
class Block:
    """x, weights and upstream by rank.  make: the right steps from every rank's weights."""

    x: Sequence[Tensor]
    weights: Sequence[Weights]
    upstream: Sequence[Tensor]
    make: Callable[[Sequence[Weights]], Program]
    variants: Callable[[Sequence[Weights]], Variants] = lambda weights: {}

    def run(self, change: Callable[[Program, Variants], Program]) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
        """Each rank's result and gradients, by the names of its weights and "x"; ``change`` makes the mistake."""
        xs = [x.detach().clone().requires_grad_() for x in self.x]
        leaves = [{name: w.detach().clone().requires_grad_() for name, w in own.items()} for own in self.weights]
        results = run_steps(change(self.make(leaves), self.variants(leaves)), xs)
        torch.autograd.backward(summed((y * u).sum() for y, u in zip(results, self.upstream)))
        return [
            (y.detach(), {"x": x.grad, **{name: leaf.grad for name, leaf in own.items()}})
            for y, x, own in zip(results, xs, leaves)
        ]

    def right(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Each rank's right result and gradients."""
        found = self.run(lambda program, variants: program)
        return [(y, {name: g for name, g in own.items() if g is not None}) for y, own in found]

    def mistakes(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Diagnosis and a rank's wrong result, of every mistake whose shapes fit together."""
        for diagnosis, wrong in mutations(self.make(self.weights), self.variants(self.weights)):
            try:
                with torch.no_grad():
                    yield diagnosis, run_steps(wrong, self.x)[rank]
            except RuntimeError:  # its shapes don't
                continue

    def explain(self, rank: int, passes: Passes) -> str | None:
        """The mistake with the right result that gives these gradients; None if there is none."""
        result, _ = self.right()[rank]
        names = [diagnosis for diagnosis, _ in mutations(self.make(self.weights), self.variants(self.weights))]
        for number, diagnosis in enumerate(names):
            try:
                found, gradients = self.run(lambda p, v, k=number: list(mutations(p, v))[k][1])[rank]  # type: ignore[misc]
            except RuntimeError:
                continue
            if close(found, result) and all(_alike(passes.gradients[name], g) for name, g in gradients.items()):
                return diagnosis
        return None


def _alike(found: Tensor | None, value: Tensor | None) -> bool:
    return found is None and value is None or found is not None and value is not None and close(found, value)


@contextmanager
def gradients_explained(block: Block, rank: int, passes: Passes) -> Iterator[None]:
    """Where the block of code finds a wrong gradient, say which step makes all of them, if one does."""
    try:
        yield
    except Wrong as wrong:
        diagnosis = block.explain(rank, passes)
        if diagnosis is None:
            raise
        raise Wrong(f"the forward is right, the gradients are not: {diagnosis}", [str(wrong)]) from None


def product(name: str, weight: str, weights: Sequence[Weights], bias: str = "") -> StepOf:
    """Every rank's y · Wᵀ, with its bias if that has a name."""

    def linear(y: Tensor, rank: int) -> Tensor:
        return F.linear(y, weights[rank][weight], weights[rank][bias] if bias else None)

    return StepOf(name, on_each(linear))


def added_bias(name: str, weights: Sequence[Weights], words: str = "", family: str = "") -> StepOf:
    """Every rank adds its copy of a bias."""
    return StepOf(
        words or name,
        on_each(lambda y, rank: y + weights[rank][name]),
        family,
        place="after the sum over the ranks, once",
    )
