"""A linear, a block or a layer: the right numbers on all ranks, and the mistakes that one makes in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.compare import close, summed
from actmem_course.judge.lab_checks.mutations import Variants, mutations
from actmem_course.judge.lab_checks.steps import Program, Running, Weights, run_steps
from actmem_course.judge.passes import Passes

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """x, weights and upstream by rank.  returns: what a rank's result is, for whoever returns another's."""

    x: Sequence[Tensor]
    weights: Sequence[Weights]
    upstream: Sequence[Tensor]
    program: Program
    variants: Variants = field(default_factory=dict)
    returns: str = ""

    def run(self, program: Program = (), upstream: Sequence[Tensor] = ()) -> list[tuple[Tensor, Gradients]]:
        """Each rank's result and gradients, by the names of its weights and "x"; zero where there is none."""
        xs = [x.detach().clone().requires_grad_() for x in self.x]
        leaves = [{name: w.detach().clone().requires_grad_() for name, w in own.items()} for own in self.weights]
        results = run_steps(program or self.program, Running(xs, leaves)).y
        torch.autograd.backward(summed((y * u).sum() for y, u in zip(results, upstream or self.upstream)))

        def gradients(own: Weights) -> Gradients:
            return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in own.items()}

        return [(y.detach(), gradients({"x": x, **own})) for y, x, own in zip(results, xs, leaves)]

    def exchanges(self) -> tuple[list[Collective], list[Collective]]:
        """What forward and backward exchange."""
        with torch.no_grad():
            return run_steps(self.program, Running(list(self.x), self.weights)).exchanges

    def inside(self) -> Block:
        """This without the operator at its entry."""
        assert self.program[0].operator
        return replace(self, x=self.program[0].operator(self.x), program=self.program[1:])

    def seen_by(self, rank: int) -> list[Tensor]:
        """The upstream at a rank's own tokens, zero elsewhere."""
        parts = [torch.zeros_like(part) for part in self.upstream[rank].chunk(len(self.x))]
        parts[rank] = self.upstream[rank].chunk(len(self.x))[rank]
        return [torch.cat(parts) if k == rank else torch.zeros_like(u) for k, u in enumerate(self.upstream)]

    def mutants(self, rank: int, backward: bool = False) -> Iterator[tuple[str, Program, Tensor]]:
        """Diagnosis, steps and this rank's result of every mistake whose shapes fit together.  backward: see mutations."""
        after = [
            Running(list(self.x), self.weights)
        ]  # what is there after each right step, so that mistakes go on from it
        with torch.no_grad():
            for step in self.program:
                after.append(run_steps([step], copy(after[-1])))
        for diagnosis, program in mutations(self.program, self.variants, self.weights[rank], len(self.x), backward):
            right = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(program, self.program)))
            try:
                with torch.no_grad():
                    result = run_steps(program[right:], copy(after[right])).y[rank]
            except (RuntimeError, IndexError):  # its shapes don't
                continue
            yield diagnosis, program, result

    def mistakes(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Diagnosis and this rank's wrong result."""
        return ((diagnosis, result) for diagnosis, _, result in self.mutants(rank))

    def explain(self, rank: int, passes: Passes) -> str | None:
        """The mistake with the right result that gives these gradients; None if there is none."""
        right, complete = self.run()[rank]
        for diagnosis, program, result in self.mutants(rank, backward=True):
            if not close(result, right):
                continue
            try:
                _, gradients = self.run(program)[rank]
            except RuntimeError:
                continue
            found = [(passes.gradients[name], gradient) for name, gradient in gradients.items()]
            if all(not g.any() if f is None else close(f, g) for f, g in found):
                # What equals the right gradients here explains nothing; another rank's are wrong.
                return None if all(close(complete[name], g) for name, g in gradients.items()) else diagnosis
        return None
