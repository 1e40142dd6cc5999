"""Every mistake that one makes in a list of steps: drop, move, repeat one; drop two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

Do = Callable[[Any], None]


@dataclass(frozen=True)
class StepOf:
    """One step.  place: where it belongs."""

    name: str
    do: Do
    place: str = ""


def mutations(
    steps: Sequence[StepOf], variants: Iterable[tuple[str, Mapping[str, Do | None]]]
) -> Iterator[tuple[str, list[StepOf]]]:
    """Diagnosis and steps; the likelier first, where two do the same.

    variants: a diagnosis, and what the steps of these names do instead; None: nothing.
    """
    for diagnosis, changes in variants:
        changed = ((step, changes.get(step.name, step.do)) for step in steps)
        yield diagnosis, [replace(step, do=do) for step, do in changed if do is not None]
    for words, times in (("is missing", 0), ("comes twice", 2)):
        for step in steps:
            yield f"{step.name} {words}{_belongs(step)}", [s for s in steps for _ in range(times if s is step else 1)]
    for i, step in enumerate(steps):
        rest = [*steps[:i], *steps[i + 1 :]]
        for place in sorted((k for k in range(len(steps)) if k != i), key=lambda k: abs(k - i)):
            where = f"before {rest[place].name}" if place < i else f"after {rest[place - 1].name}"
            yield f"{step.name} comes {where}{_belongs(step)}", [*rest[:place], step, *rest[place:]]
    for one, other in combinations(steps, 2):
        yield f"{one.name} and {other.name} are missing", [step for step in steps if step not in (one, other)]
    for step in steps:
        for place in range(len(steps) + 1):
            where = f"before {steps[place].name}" if place < len(steps) else "at the end"
            yield f"{step.name} comes {where} as well{_belongs(step)}", [*steps[:place], step, *steps[place:]]


def _belongs(step: StepOf) -> str:
    return f": it belongs {step.place}" if step.place else ""
