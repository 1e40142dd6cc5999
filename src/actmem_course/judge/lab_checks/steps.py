"""A block as a list of named steps on all ranks at once, so that its mistakes can be made: drop, repeat, move, replace one.

Every step maps the ranks' tensors to the ranks' tensors.  The four operators have the gradients
that they should have, by ordinary autograd over all ranks, so one backward gives every rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class Running:
    """The ranks' tensors between two steps.

    y: what is worked on; x: the residual; start: what came in; normed: what the last layer norm gave.
    dropped: how often dropouts.block has run.
    """

    y: list[Tensor]
    x: list[Tensor]
    start: list[Tensor]
    normed: list[Tensor]
    dropped: int = 0

    @property
    def t(self) -> int:
        return len(self.y)


Do = Callable[[Running], None]


@dataclass(frozen=True)
class StepOf:
    """One step.  name: with its article, if it has one.  family: the same in all blocks of a layer.  place: where it belongs."""

    name: str
    do: Do
    family: str = ""
    place: str = ""


Program = Sequence[StepOf]
#: Diagnosis -> what the steps of these names do instead; None: nothing.
Variants = Mapping[str, Mapping[str, Do | None]]


def on_each(function: Callable[[Tensor, int], Tensor]) -> Do:
    """A step that every rank does by itself, with its number."""

    def do(state: Running) -> None:
        state.y = [function(y, rank) for rank, y in enumerate(state.y)]

    return do


def f_of_all(state: Running) -> None:
    """f: nothing in forward, the sum over the ranks in backward."""
    state.y = [
        y + sum(other - other.detach() for k, other in enumerate(state.y) if k != rank)
        for rank, y in enumerate(state.y)
    ]


def f_bar_of_all(state: Running) -> None:
    """f_bar: the sum in forward, nothing in backward."""
    state.y = [
        y + sum(other.detach() for k, other in enumerate(state.y) if k != rank) for rank, y in enumerate(state.y)
    ]


def g_of_all(state: Running) -> None:
    """g."""
    state.y = [torch.cat(state.y)] * state.t


def g_bar_of_all(state: Running) -> None:
    """g_bar."""
    if state.y[0].shape[0] % state.t:
        raise RuntimeError("the ranks can't share these tokens")
    state.y = list(sum(state.y[1:], state.y[0]).chunk(state.t))


def keep_residual(state: Running) -> None:
    """What is added at the block's end."""
    state.x = state.y


def add_residual(state: Running) -> None:
    state.y = [x + y for x, y in zip(state.x, state.y)]
    keep_residual(state)


def one_after_another(*parts: Do) -> Do:
    """Several steps as one."""

    def do(state: Running) -> None:
        for part in parts:
            part(state)

    return do


def run_steps(program: Program, x: Sequence[Tensor]) -> list[Tensor]:
    """What comes out on every rank, of every rank's x."""
    state = Running(list(x), list(x), list(x), list(x))
    for step in program:
        step.do(state)
    return state.y


def mutations(program: Program, variants: Variants) -> Iterator[tuple[str, Program]]:
    """Diagnosis and program for the variants, and for every mistake of one step; where a family has several, for all of them too."""
    steps = list(program)
    for diagnosis, changes in variants.items():
        changed = ((step, changes.get(step.name, step.do)) for step in steps)
        yield diagnosis, [replace(step, do=do) for step, do in changed if do is not None]
    for i, step in enumerate(steps):
        yield f"{step.name} is missing{_belongs(step)}", steps[:i] + steps[i + 1 :]
    families = sorted({step.family for step in steps if step.family})
    families = [family for family in families if sum(step.family == family for step in steps) > 1]
    for family in families:
        yield f"{family} is missing, in all places where it belongs", [s for s in steps if s.family != family]
    yield from _moves(steps, across=True)  # the likelier mistake, where two moves make the same numbers
    for family in families:  # the same move in every block
        for distance in (-1, 1, -2, 2, -3, 3):
            moved = _all_moved(steps, family, distance)
            if moved:
                over = steps[next(i for i, step in enumerate(steps) if step.family == family) + distance]
                where = f"{'before' if distance < 0 else 'after'} {over.family or over.name}"
                yield f"{family} comes {where}, in all places", moved
    for i, step in enumerate(steps):
        yield f"{step.name} comes twice", [*steps[: i + 1], step, *steps[i + 1 :]]
    for family in families:
        twice = [s for step in steps for s in (step, step)[: 1 + (step.family == family)]]
        yield f"{family} comes twice, in all places", twice
    yield from _moves(steps, across=False)


def _moves(steps: list[StepOf], across: bool) -> Iterator[tuple[str, Program]]:
    """One step elsewhere: across an exchange between the ranks, or not."""
    together = (f_of_all, f_bar_of_all, g_of_all, g_bar_of_all)
    for i, step in sorted(enumerate(steps), key=lambda numbered: numbered[1].do in together):
        rest = steps[:i] + steps[i + 1 :]
        for place in sorted((k for k in range(len(steps)) if k != i), key=lambda k: abs(k - i)):
            between = rest[min(place, i) : max(place, i)]
            if any(other.do in together for other in (step, *between)) == across:
                where = f"before {rest[place].name}" if place < i else f"after {rest[place - 1].name}"
                yield f"{step.name} comes {where}{_belongs(step)}", [*rest[:place], step, *rest[place:]]


def _belongs(step: StepOf) -> str:
    return f": it belongs {step.place}" if step.place else ""


def _all_moved(steps: list[StepOf], family: str, distance: int) -> list[StepOf] | None:
    moved = list(steps)
    mine = [i for i, step in enumerate(steps) if step.family == family]
    if len(mine) < 2:
        return None
    for i in reversed(mine) if distance > 0 else mine:
        if not 0 <= i + distance < len(moved):
            return None
        moved.insert(i + distance, moved.pop(i))
    return moved
