"""What a lab and its exercises are made of: what is asked, where it is explained, the hints, and the stated mistakes.

A stated mistake is one that we expect of a learner.  It is written as an edit of our solution.  Loads no torch.
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
    """Read the hints of all exercises from ``hints.md``, where they are the items of a list below each heading.

    Returns: by the exercise's number, its hints, from a nudge to nearly the answer.
    """
    text = (Path(__file__).parent / "hints.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (\S+).*", text, flags=re.MULTILINE)
    lists = (re.split(r"^- ", part, flags=re.MULTILINE)[1:] for part in parts[1::2])
    return {number: tuple(" ".join(hint.split()) for hint in items) for number, items in zip(parts[::2], lists)}


@dataclass(frozen=True)
class Exercise:
    """A function to write, and how it is judged.

    Attributes:
        number: as "2.1".
        function: its name.
        section: the heading of the section that explains it.
        case: the name of its case in the lab's file of cases; "" if it is the function's name.
        seconds: if a rank works on it for longer, it is taken to be stuck.
        takes_group: whether the function is given a process group.  It is then judged on several groups.
        chapter: the notebook that the section is in; "" if it is the lab's.
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
    """A lab.

    Attributes:
        name: its file's name without ``.py``.
        title: as it is printed.
        chapter: the notebook that explains it, without ``.ipynb``.
        exercises: in their order.
        one_process: whether it runs without ranks and process groups.
        fewest_virtual: it is judged on at least so many virtual ranks, because on fewer some mistake changes nothing.
        mistakes: the stated mistakes by exercise's number, the likelier first.
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
            numbers: theirs; an empty list stands for all.
            argument: the option that the numbers were given by, for the error's message.

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
    """A stated mistake.

    Args:
        cause: what in the code is wrong, in a learner's words.
        repair: what to do; "" if the cause says it.
        edits: ways to write the mistake.  Each maps pieces of our solution's text to what stands in place of them.
    """

    def __init__(self, cause: str, repair: str, *edits: Mapping[str, str]):
        self.cause, self.repair, self.edits = cause, repair, edits

    def sources(self, solution: str) -> Iterator[str]:
        """Yield the text of our solution after each of the edits."""
        for edit in self.edits:
            edited = solution
            for old, new in edit.items():
                assert old in edited, f"our solution no longer has {old!r}, of the mistake {self.cause!r}"
                edited = edited.replace(old, new)
            yield edited


def replacing(old: str, *mistakes: tuple[str, str, str]) -> list[Mistake]:
    """Make mistakes that each put something else in place of the same piece of our solution.

    Args:
        old: the piece of our solution's text.
        mistakes: the cause, the repair and the new piece of each.
    """
    return [Mistake(cause, repair, {old: new}) for cause, repair, new in mistakes]


def ways(old: str, *new: str) -> list[Mapping[str, str]]:
    """Make edits of our solution that are each one way to make the same mistake.

    Args:
        old: the piece of our solution's text that is replaced.
        new: what each edit puts in its place.

    Returns: for each way, the edit as ``Mistake`` takes it: the new piece by the old one.
    """
    return [{old: text} for text in new]


def names_of(source: str, file: str) -> dict | None:
    """Run the text of an edited solution.

    Args:
        source: the text.
        file: what the solution takes for its own file.

    Returns: the names that it defines; None if it raises.
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
