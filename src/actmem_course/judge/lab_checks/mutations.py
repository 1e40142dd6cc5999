"""Every mistake that one makes in a list of steps: drop, move, repeat or replace one, or the same in all blocks; drop two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, permutations

from actmem_course.judge.lab_checks.exchanged import USUAL
from actmem_course.judge.lab_checks.operators import OPERATORS, Operator
from actmem_course.judge.lab_checks.steps import Do, Program, Running, StepOf, Weights, added_bias, exchanging

#: Diagnosis -> what the steps of these names do instead; None: nothing.
Variants = Mapping[str, Mapping[str, "Do | None"]]
Mutants = Iterator[tuple[str, Program]]
_OPERATOR_NAMES = [operator.name for operator in OPERATORS]


def mutations(program: Program, variants: Variants, weights: Weights, t: int, backward: bool = False) -> Mutants:
    """Diagnosis and program; the likelier first, where two give the same numbers.

    weights: a rank's, for their shapes.  backward: operators with another backward, not with another forward.
    """
    steps = list(program)
    # An operator's family last: rather something else than g_bar is in the wrong place.
    families = sorted({step.family for step in steps if step.family}, key=lambda name: (name in _OPERATOR_NAMES, name))
    yield from _varied(steps, variants.items())
    yield from _everywhere(steps, families, "is missing", lambda step: [])
    yield from _moves(steps, across=True)
    yield from _family_moves(steps, families)
    yield from _everywhere(steps, families, "comes twice", lambda step: [step, step])
    yield from _other_operators(steps, t, backward)
    yield from _scaled_biases(steps, t)
    yield from _inserted_operators(steps)
    yield from _other_weights(steps, weights)
    yield from _moves(steps, across=False)
    yield from _two_missing(steps)
    yield from _copies(steps)


def plain_mutations(program: Program, variants: Iterable[tuple[str, Mapping[str, Do | None]]]) -> Mutants:
    """The same for steps that know nothing of operators and weights."""
    steps = list(program)
    yield from _varied(steps, variants)
    yield from _everywhere(steps, [], "is missing", lambda step: [])
    yield from _everywhere(steps, [], "comes twice", lambda step: [step, step])
    yield from _moves(steps, across=False)
    yield from _two_missing(steps)
    yield from _copies(steps)


def _varied(steps: list[StepOf], variants: Iterable[tuple[str, Mapping[str, Do | None]]]) -> Mutants:
    for diagnosis, changes in variants:
        changed = ((step, changes.get(step.name, step.do)) for step in steps)
        yield diagnosis, [replace(step, do=do) for step, do in changed if do is not None]


def _two_missing(steps: list[StepOf]) -> Mutants:
    for one, other in combinations(steps, 2):
        yield f"{one.name} and {other.name} are missing", [step for step in steps if step not in (one, other)]


def _everywhere(
    steps: list[StepOf], families: list[str], what: str, change: Callable[[StepOf], list[StepOf]]
) -> Mutants:
    """Every step changed, and then every family in all places."""

    def changed(wanted: Callable[[StepOf], bool]) -> list[StepOf]:
        return [new for step in steps for new in (change(step) if wanted(step) else [step])]

    for step in steps:
        yield f"{step.name} {what}{_belongs(step)}", changed(lambda other: other is step)
    for family in families:
        one = next(step for step in steps if step.family == family)
        yield f"{family} {what}, in all places{_belongs(one)}", changed(lambda other: other.family == family)


def _belongs(step: StepOf) -> str:
    return f": it belongs {step.place}" if step.place else ""


def _moves(steps: list[StepOf], across: bool, only: int | None = None) -> Mutants:
    """One step elsewhere: across an exchange between the ranks, or not.  only: this step."""
    for i in sorted(range(len(steps)) if only is None else [only], key=lambda k: steps[k].operator is not None):
        step = steps[i]
        rest = steps[:i] + steps[i + 1 :]
        for place in sorted((k for k in range(len(steps)) if k != i), key=lambda k: abs(k - i)):
            between = rest[min(place, i) : max(place, i)]
            if any(other.operator for other in (step, *between)) == across:
                where = f"before {rest[place].name}" if place < i else f"after {rest[place - 1].name}"
                yield f"{step.name} comes {where}{_belongs(step)}", [*rest[:place], step, *rest[place:]]


def _copies(steps: list[StepOf]) -> Mutants:
    """One step that stays where it is and comes elsewhere as well."""
    for step in (step for step in steps if not step.operator):
        for place in range(len(steps) + 1):
            where = f"before {steps[place].name}" if place < len(steps) else "at the end"
            yield f"{step.name} comes {where} as well{_belongs(step)}", [*steps[:place], step, *steps[place:]]


def _family_moves(steps: list[StepOf], families: list[str]) -> Mutants:
    """The same move in every block."""
    for family in families:
        mine = [i for i, step in enumerate(steps) if step.family == family]
        for distance in sorted(range(-10, 11), key=abs):
            if not distance or mine[0] + distance < 0 or mine[-1] + distance >= len(steps):
                continue
            moved = list(steps)
            for i in reversed(mine) if distance > 0 else mine:
                moved.insert(i + distance, moved.pop(i))
            over = steps[mine[0] + distance]
            where = f"{'before' if distance < 0 else 'after'} {over.family or over.name}"
            yield f"{family} comes {where}, in all places{_belongs(steps[mine[0]])}", moved


def _other_operators(steps: list[StepOf], t: int, backward: bool) -> Mutants:
    """Another operator in the place of one, or one with another forward or backward; in one place, and in all."""
    others: list[tuple[str, Operator, Operator]] = []
    for right in (operator for operator in OPERATORS if any(step.operator is operator for step in steps)):
        made = [made.scaled(ratio, t) for ratio in (1, t, 1 / t) for made in USUAL]
        if backward:
            words = f"gives in backward {{}}; it should give {right.backward.words}: {right.in_backward}"
            others += [(words.format(m.words), right, replace(right, backward=m)) for m in made]
        else:
            calls = f"belongs where {{}} is called: {right.in_forward}"
            others += [(calls.format(other.name), right, other) for other in OPERATORS if other is not right]
            words = f"gives {{}}; it should give {right.forward.words}: {right.in_forward}"
            others += [(words.format(m.words), right, replace(right, forward=m)) for m in made]
    for words, right, other in others:
        places = [step for step in steps if step.operator is right]
        instead = {step: replace(step, do=exchanging(other).do) for step in places}
        for step in places:
            yield f"{step.name} {words}", [instead[s] if s is step else s for s in steps]
        if len(places) > 1:
            yield f"every {right.name} {words}", [instead.get(s, s) for s in steps]


def _scaled_biases(steps: list[StepOf], t: int) -> Mutants:
    """A bias t times, or a t-th of it; there, and across an exchange."""
    for i, step in enumerate(steps):
        for words, remedy, factor in (
            ("added t times", "add it once", t),
            ("divided by t", "add the whole of it", 1 / t),
            ("subtracted", "add it", -1),
        ):
            if step.bias:
                scaled = replace(added_bias(step.bias, step.place, times=factor), name=f"{step.bias}, {words},")
                program = [*steps[:i], scaled, *steps[i + 1 :]]
                yield f"{step.bias} is {words}: {remedy}", program
                yield from _moves(program, across=True, only=i)


def _inserted_operators(steps: list[StepOf]) -> Mutants:
    """An operator where none belongs."""
    for operator in OPERATORS:
        for place in range(len(steps) + 1):
            where = f"before {steps[place].name}" if place < len(steps) else "at the end"
            words = f"{operator.name} is called {where}, where nothing is to be exchanged"
            yield words, [*steps[:place], exchanging(operator), *steps[place:]]


def _other_weights(steps: list[StepOf], weights: Weights) -> Mutants:
    """Weights of one shape swapped, or one used in the other's place."""

    def size(group: str, kind: str) -> object:
        return getattr(weights.get(f"{group}_{kind}"), "shape", None)

    groups = list(dict.fromkeys(name.rpartition("_")[0] for name in weights))  # in the order in which they are used
    for one, other in permutations(groups, 2):
        kinds = [kind for kind in ("weight", "bias") if size(one, kind) and size(one, kind) == size(other, kind)]
        there = {f"{other}_{kind}": f"{one}_{kind}" for kind in kinds}
        both = f"{' and '.join(kinds)}"
        if kinds and groups.index(one) < groups.index(other):
            swapped = there | {used: name for name, used in there.items()}
            yield f"{one}'s and {other}'s {both} are swapped: {one}'s come first", [_renaming(swapped), *steps]
        if kinds:
            yield f"{one}'s {both} also stand where {other}'s belong", [_renaming(there), *steps]


def _renaming(names: Mapping[str, str]) -> StepOf:
    def do(state: Running) -> None:
        state.w = [{**own, **{name: own[used] for name, used in names.items()}} for own in state.w]

    return StepOf("the choice of weights", do)
