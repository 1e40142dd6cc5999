"""The data of labs and exercises: the function to write, the chapter that explains it, hints, and stated mistakes.

A stated mistake is one that we expect learners to make.  It is written as an edit of our solution.  This module doesn't
import torch.
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
    """Read the hints of all exercises from ``hints.md``, which has a list of hints below each exercise's heading.

    Returns: by the exercise's number ("2.1"), its hints, the vaguest first; the last is nearly the answer.
    """
    text = (Path(__file__).parent / "hints.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (\S+).*", text, flags=re.MULTILINE)
    lists = (re.split(r"^- ", part, flags=re.MULTILINE)[1:] for part in parts[1::2])
    return {number: tuple(" ".join(hint.split()) for hint in items) for number, items in zip(parts[::2], lists)}


@dataclass(frozen=True)
class Exercise:
    """An exercise: a function to write, and how it is judged.

    Attributes:
        number: its number, such as "2.1".
        function: the function's name.
        section: the heading of the chapter's section that explains it.
        case: the name of its case in the lab's file of cases; "" if that is the function's name.
        seconds: a rank that works on it for longer counts as stuck.
        takes_group: whether the function takes a process group.  It is then judged on several groups.
        chapter: the notebook that has the section; "" if it is the lab's chapter.
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
    """A lab: a file with several exercises.

    Attributes:
        name: its file's name without ``.py``.
        title: its title, as printed.
        chapter: the notebook that explains it, without ``.ipynb``.
        exercises: its exercises in order.
        one_process: whether it needs no ranks and no process groups.
        fewest_virtual: the fewest virtual ranks on which it can be judged; on fewer, some mistake has no effect.
        mistakes: the mistakes that we expect and the judge can name, by the exercise's number, the likelier first.
    """

    name: str
    title: str
    chapter: str
    exercises: tuple[Exercise, ...]
    one_process: bool = False
    fewest_virtual: int = 1
    mistakes: dict[str, tuple[Mistake, ...]] = field(default_factory=dict, compare=False)

    def choose(self, numbers: list[str], argument: str) -> tuple[Exercise, ...]:
        """Return some of the exercises.

        Args:
            numbers: the numbers of the exercises; an empty list stands for all.
            argument: the command-line option with these numbers, for the error's message.

        Raises: ConfigError on an unknown number.
        """
        if not numbers:
            return self.exercises
        known = [exercise.number for exercise in self.exercises]
        for number in numbers:
            if number not in known:
                raise ConfigError(argument, f"must be one of {', '.join(known)}, got {number}")
        return tuple(exercise for exercise in self.exercises if exercise.number in numbers)


class Mistake:
    """A mistake that we expect learners to make, so that the judge can name it (a stated mistake).

    Args:
        cause: what is wrong in the code, in words for the learner.
        repair: what the learner should do; "" if the cause says it already.
        edits: ways to make the mistake in our solution: each maps pieces of its source text to their replacements.
    """

    def __init__(self, cause: str, repair: str, *edits: Mapping[str, str]):
        self.cause, self.repair, self.edits = cause, repair, edits

    def sources(self, solution: str) -> Iterator[str]:
        """Yield the source text of our solution once for each of the edits, with the edit applied."""
        for edit in self.edits:
            edited = solution
            for old, new in edit.items():
                assert old in edited, f"our solution no longer has {old!r}, of the mistake {self.cause!r}"
                edited = edited.replace(old, new)
            yield edited


def replacing(old: str, *mistakes: tuple[str, str, str]) -> list[Mistake]:
    """Make several mistakes that all replace the same piece of our solution's source text.

    Args:
        old: the piece.
        mistakes: for each mistake a tuple: its cause, its repair, and what replaces the piece.
    """
    return [Mistake(cause, repair, {old: new}) for cause, repair, new in mistakes]


def ways(old: str, *new: str) -> list[Mapping[str, str]]:
    """Make several edits of our solution that are different ways to make one mistake.

    Args:
        old: the piece of our solution's source text that all of them replace.
        new: for each edit, what replaces it.

    Returns: the edits, in the form that ``Mistake`` takes: {old: new}.
    """
    return [{old: text} for text in new]


def names_of(source: str, file: str) -> dict | None:
    """Execute the source text of an edited solution.

    Args:
        source: the text.
        file: the path that it gets as its ``__file__``.

    Returns: the names that it defines, with their values; None if it raises.
    """
    names = {"__name__": "edited", "__file__": file}
    try:
        for definition in source.split("\n\n\n"):
            exec(_compiled(definition), names)
    except Exception:
        return None
    return names


@lru_cache(maxsize=5000)
def _compiled(definition: str) -> CodeType:
    """Compile a definition, once: edits differ from each other in one or two definitions, and compiling all of them
    takes longer than most cases."""
    return compile(definition, "<an edit of ours>", "exec")
