"""What an exercise is made of: what is asked, which chapter explains it, its hints, and mistakes that somebody has
stated, each an edit of our solution.

Loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType

from actmem.config import ConfigError


@cache
def hints() -> dict[str, tuple[str, ...]]:
    """Of each exercise, from a nudge to nearly the answer: in ``hints.md`` the items of the list below its heading."""
    text = (Path(__file__).parent / "hints.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (\S+).*", text, flags=re.MULTILINE)
    lists = (re.split(r"^- ", part, flags=re.MULTILINE)[1:] for part in parts[1::2])
    return {number: tuple(" ".join(hint.split()) for hint in items) for number, items in zip(parts[::2], lists)}


@dataclass(frozen=True)
class Exercise:
    """One function to write, and how it is judged.

    case: its name in the lab's file of cases, if that isn't the function's.  section: of the chapter to read, and
    chapter the chapter, if it isn't the lab's.  seconds: a rank that works on it for longer is taken to be stuck.
    takes_group: it is handed a process group, and is judged on several.
    """

    number: str
    function: str
    section: str
    case: str = ""
    seconds: int = 30
    takes_group: bool = False
    chapter: str = ""


@dataclass(frozen=True)
class Lab:
    """A lab: its exercises in order.

    one_process: it needs no ranks.  fewest_virtual: it is judged on no fewer virtual ranks, because a mistake is
    none on fewer.  mistakes: by exercise, the likelier first.
    """

    name: str
    title: str
    chapter: str
    exercises: tuple[Exercise, ...]
    one_process: bool = False
    fewest_virtual: int = 1
    mistakes: dict[str, tuple[Mistake, ...]] = field(default_factory=dict, compare=False)

    def choose(self, numbers: list[str], argument: str) -> tuple[Exercise, ...]:
        """The exercises of these numbers, all if there are none.  Raises ConfigError on an unknown number."""
        if not numbers:
            return self.exercises
        known = [exercise.number for exercise in self.exercises]
        for number in numbers:
            if number not in known:
                raise ConfigError(argument, f"must be one of {', '.join(known)}, got {number}")
        return tuple(exercise for exercise in self.exercises if exercise.number in numbers)


class Mistake:
    """A mistake.

    Args:
        cause: what in the code is wrong, in a learner's words.
        repair: what to do; "" if the cause says it.
        edits: ways to make the mistake: each has pieces of our solution, and what to put in place of them.
    """

    def __init__(self, cause: str, repair: str, *edits: Mapping[str, str]):
        self.cause, self.repair, self.edits = cause, repair, edits

    def sources(self, solution: str) -> Iterator[str]:
        """The text of our solution after each edit."""
        for edit in self.edits:
            edited = solution
            for old, new in edit.items():
                assert old in edited, f"our solution no longer has {old!r}, of the mistake {self.cause!r}"
                edited = edited.replace(old, new)
            yield edited


def replacing(old: str, *mistakes: tuple[str, str, str]) -> list[Mistake]:
    """Mistakes that put something else in place of one piece of our solution.

    mistakes: cause, repair and the new piece of each.
    """
    return [Mistake(cause, repair, {old: new}) for cause, repair, new in mistakes]


def ways(old: str, *new: str) -> list[Mapping[str, str]]:
    """Edits that each put something else in place of one piece of our solution."""
    return [{old: one} for one in new]


def names_of(source: str, file: str) -> dict | None:
    """What an edited solution defines; None if it can't be run."""
    names = {"__name__": "edited", "__file__": file}
    try:
        for definition in source.split("\n\n\n"):
            exec(_compiled(definition), names)
    except Exception:
        return None
    return names


@lru_cache(maxsize=5000)
def _compiled(definition: str) -> CodeType:
    """One edit differs from the next in a definition or two, and to compile all of them takes longer than many a
    case."""
    return compile(definition, "<an edit of ours>", "exec")
