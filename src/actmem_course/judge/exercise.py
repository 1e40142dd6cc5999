"""What a lab asks for.  Loads no torch: a check is named here and loaded by the ranks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from actmem.config import ConfigError


def _named(place: str) -> Callable:
    """The function that ``place`` names: "cases.lab3_sequence_parallel:g", or in lab_checks "lab5_orders:check_interleaved"."""
    module, _, function = place.partition(":")
    folder, _, name = module.rpartition(".")
    if folder:
        return getattr(importlib.import_module(f"actmem_course.judge.cases.{name}"), function)
    return getattr(importlib.import_module(f"actmem_course.judge.lab_checks.{name}"), function)


@cache
def _hints() -> dict[str, tuple[str, ...]]:
    """The hints of ``hints.md`` by exercise: each is an item of the list below its heading."""
    text = (Path(__file__).parent / "hints.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (\S+).*", text, flags=re.MULTILINE)
    lists = (re.split(r"^- ", part, flags=re.MULTILINE)[1:] for part in parts[1::2])
    return {number: tuple(" ".join(hint.split()) for hint in items) for number, items in zip(parts[::2], lists)}


@dataclass(frozen=True)
class Exercise:
    """One function to write, and how it is judged.

    judged_by: where its check is, or the file of its case, which has the function's name if none is given.  section: of the chapter to
    read.  seconds: a rank that works on it for longer is taken to be stuck.  takes_group: it is handed a process group,
    and is judged on several.
    """

    number: str
    function: str
    judged_by: str
    section: str = ""
    seconds: int = 30
    takes_group: bool = False

    @property
    def hints(self) -> tuple[str, ...]:
        """From a nudge to nearly the answer."""
        return _hints()[self.number]

    @property
    def check(self) -> Callable:
        """Called with a Bench, or a CaseRun if it is a case; raises Wrong, or returns a remark or None."""
        return _named(self.judged_by if ":" in self.judged_by else f"{self.judged_by}:{self.function}")

    @property
    def is_case(self) -> bool:
        """Whether its check is a case, which says what it sees; mistakes are then edits of our own answer."""
        return self.judged_by.startswith("cases.")

    @property
    def lab(self) -> str:
        """The lab's name, of a case."""
        return self.judged_by.removeprefix("cases.").partition(":")[0]


@dataclass(frozen=True)
class Lab:
    """A lab: its exercises in order, and what is measured once all are passed.

    measured_by: where its reward is.  one_process: it needs no ranks.  fewest_virtual: it is judged on no fewer virtual
    ranks, because a mistake is none on fewer.
    """

    name: str
    title: str
    chapter: str
    exercises: tuple[Exercise, ...]
    measured_by: str
    one_process: bool = False
    fewest_virtual: int = 1

    @property
    def reward(self) -> Callable:
        """Called with a Bench on every rank, returns a Reward (see ``reward``)."""
        return _named(self.measured_by)

    def choose(self, numbers: list[str], argument: str) -> tuple[Exercise, ...]:
        """The exercises of these numbers, all if there are none.  Raises ConfigError on an unknown number."""
        if not numbers:
            return self.exercises
        known = [exercise.number for exercise in self.exercises]
        for number in numbers:
            if number not in known:
                raise ConfigError(argument, f"must be one of {', '.join(known)}, got {number}")
        return tuple(exercise for exercise in self.exercises if exercise.number in numbers)
