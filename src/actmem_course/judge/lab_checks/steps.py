"""A block as a list of named steps on all ranks at once: every step maps the ranks' tensors to the ranks' tensors.

The operators have the gradients that they should have, by autograd over all ranks, so one backward
gives every rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.lab_checks.operators import Operator, exchange_of

Weights = Mapping[str, Tensor]


@dataclass
class Running:
    """The ranks' tensors between two steps.

    y: what is worked on; w: the weights; x: the residual; start: what came in.
    dropped: how often dropouts.block has run.  exchanges: what forward and backward exchange, so far.
    """

    y: list[Tensor]
    w: Sequence[Weights]
    x: list[Tensor] = field(init=False)
    start: list[Tensor] = field(init=False)
    dropped: int = 0
    exchanges: tuple[list[Collective], list[Collective]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        self.start = self.x = self.y


Do = Callable[[Running], None]


@dataclass(frozen=True)
class StepOf:
    """One step.

    family: the same in all blocks of a layer.  place: where it belongs.  operator: what it exchanges.
    bias: what it adds.
    """

    name: str
    do: Do
    family: str = ""
    place: str = ""
    operator: Operator | None = None
    bias: str = ""


Program = Sequence[StepOf]


def run_steps(program: Program, state: Running) -> Running:
    """``state`` after all steps."""
    for step in program:
        step.do(state)
    return state


def on_each(function: Callable[[Tensor, Weights], Tensor]) -> Do:
    """A step that every rank does by itself, with its weights."""

    def do(state: Running) -> None:
        state.y = [function(y, own) for y, own in zip(state.y, state.w)]

    return do


def step_product(weight: str, name: str = "") -> StepOf:
    """Every rank's y · Wᵀ."""
    return StepOf(name or f"the product with {weight}", on_each(lambda y, w: F.linear(y, w[weight])))


def added_bias(bias: str, place: str, family: str = "", times: float = 1) -> StepOf:
    """Every rank adds its copy of a bias."""
    return StepOf(bias, on_each(lambda y, w: y + times * w[bias]), family, place, bias=bias)


def exchanging(operator: Operator, of: str = "") -> StepOf:
    """One of the four operators.  of: "attention's", where a layer has several."""

    def do(state: Running) -> None:
        before, state.y = state.y[0], operator(state.y)
        for made, seen in zip((operator.forward, operator.backward), state.exchanges):
            seen += exchange_of(made, before, state.y[0])

    return StepOf(f"{of} {operator.name}".lstrip(), do, operator.name if of else "", operator.place, operator)


def enter_block(state: Running) -> None:
    """The residual branches off: what comes in now is added at the block's end."""
    state.x = state.y


def add_residual(state: Running) -> None:
    """The block's end."""
    state.y = [x + y for x, y in zip(state.x, state.y)]
