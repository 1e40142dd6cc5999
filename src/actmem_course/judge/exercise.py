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
        section: the heading of the notebook's section that explains the exercise.
        case: the name of the exercise's case (the function that tests an answer) in the lab's file in ``cases``; "" if
            the case has the name of ``function``.
        seconds: if a rank works on the exercise for longer, it counts as stuck.
        takes_group: whether the function takes a process group.  The exercise is then judged on several groups.
        chapter: the notebook that has the section, without ``.ipynb``; "" if it is the lab's chapter.
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
        name: the file's name without ``.py``, such as "lab2_tensor_parallel".
        title: the lab's title, as it is printed: "Lab 2: tensor parallelism".
        chapter: the notebook that explains the lab, without ``.ipynb``.
        exercises: the lab's exercises in order.
        one_process: whether the lab needs no ranks and no process groups.
        fewest_virtual: the fewest virtual ranks on which the lab can be judged; on fewer, some mistake has no effect.
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
            numbers: the numbers of the exercises, such as ["2.1"]; an empty list stands for all.
            argument: the name of the command-line option that gave these numbers, such as "only", for the error's
                message.

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
        cause: what is wrong in the code, a text that the learner reads.
        repair: what the learner should do; "" if the cause says that already.
        edits: ways to make the mistake in our solution: each maps pieces of its source text to their replacements.
    """

    def __init__(self, cause: str, repair: str, *edits: Mapping[str, str]):
        self.cause, self.repair, self.edits = cause, repair, edits

    def sources(self, solution: str) -> Iterator[str]:
        """Yield the source text of our solution once for each of the edits, with the edit applied.

        Args:
            solution: the source text of our solution, without any edit.
        """
        for edit in self.edits:
            edited = solution
            for old, new in edit.items():
                assert old in edited, f"our solution no longer has {old!r}, of the mistake {self.cause!r}"
                edited = edited.replace(old, new)
            yield edited


def replacing(old: str, *mistakes: tuple[str, str, str]) -> list[Mistake]:
    """Make several mistakes that all replace the same piece of our solution's source text.

    Args:
        old: the piece of source text.
        mistakes: for each mistake a tuple (cause, repair, new), where ``new`` replaces the piece.
    """
    return [Mistake(cause, repair, {old: new}) for cause, repair, new in mistakes]


def ways(old: str, *new: str) -> list[Mapping[str, str]]:
    """Make several edits of our solution, each of which makes the same mistake in another way.

    Args:
        old: the piece of our solution's source text that all edits replace.
        new: for each edit, the text that replaces the piece.

    Returns: a dict {old: new} for each edit, to be given to ``Mistake``.
    """
    return [{old: text} for text in new]


def names_of(source: str, file: str) -> dict | None:
    """Execute the source text of an edited solution.

    Args:
        source: the source text of the edited solution.
        file: the path that the text sees as its ``__file__``.

    Returns: the names that the text defines, with their values; None if executing it raises an exception.
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
