"""All labs, and what belongs to each: cases, our solutions.

Loads no torch: cases are loaded by the ranks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from actmem.config import ConfigError
from actmem_course.judge.exercise import Exercise, Lab, Mistake
from actmem_course.strip_solutions import lab_names


def _module(folder: str, name: str) -> ModuleType:
    return importlib.import_module(f"actmem_course.judge.{folder}.{name}")


ALL_LABS: tuple[Lab, ...] = tuple(_module("exercises", name).LAB for name in lab_names())


def lab_of_file(script: Path, doc: str) -> Lab:
    """Which lab a learner's file is: by the line "Lab 2: …" of its docstring, or by its name.

    Raises ConfigError if neither says so.
    """
    said = re.search(r"^Lab (\d+):", doc, re.MULTILINE) or re.match(r"lab(\d+)", script.stem)
    found = [lab for lab in ALL_LABS if said and lab.name.startswith(f"lab{said[1]}_")]
    if not found:
        how = f'Name it as it was, or begin its docstring with "Lab 1: …" (1 to {len(ALL_LABS)})'
        raise ConfigError("file", f"which lab is it?  {how}")
    return found[0]


def load_lab(name: str) -> Lab:
    """The lab of that file name."""
    return next(lab for lab in ALL_LABS if lab.name == name)


def lab_of(exercise: Exercise) -> Lab:
    """The lab that an exercise is in."""
    return next(lab for lab in ALL_LABS if exercise in lab.exercises)


def solution_module(name: str) -> ModuleType:
    """Our own solution of a lab."""
    return _module("solutions", name)


def case_of(exercise: Exercise) -> Callable:
    """Called with a CaseRun: says what it sees, and raises Wrong where that needs no comparison; a remark, or None."""
    return getattr(_module("cases", lab_of(exercise).name), exercise.case or exercise.function)


def mistakes_of(exercise: Exercise) -> Sequence[Mistake]:
    """The stated mistakes of an exercise, the likelier first."""
    return lab_of(exercise).mistakes.get(exercise.number, ())
