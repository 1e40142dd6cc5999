"""Find labs, and import their exercises, cases (the functions that test exercises) and solutions.

This module doesn't import torch.  Cases and solutions do, so each is imported only when it is needed.
"""

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
    """Return the lab that a learner's file belongs to.

    Args:
        script: the path of the learner's file.
        doc: the file's docstring.  A line "Lab 2: …" in it names the lab; without such a line the file's name does, if
            it begins with "lab2".

    Raises: ConfigError if neither the docstring nor the file's name names a lab.
    """
    number = re.search(r"^Lab (\d+):", doc, re.MULTILINE) or re.match(r"lab(\d+)", script.stem)
    labs = [lab for lab in ALL_LABS if number and lab.name.startswith(f"lab{number[1]}_")]
    if not labs:
        how = f'Name it as it was, or begin its docstring with "Lab 1: …" (1 to {len(ALL_LABS)})'
        raise ConfigError("file", f"which lab is it?  {how}")
    return labs[0]


def load_lab(name: str) -> Lab:
    """Return the lab with this name, such as "lab2_tensor_parallel"."""
    return next(lab for lab in ALL_LABS if lab.name == name)


def lab_of(exercise: Exercise) -> Lab:
    """Return the lab that an exercise belongs to."""
    return next(lab for lab in ALL_LABS if exercise in lab.exercises)


def solution_module(name: str) -> ModuleType:
    """Import our own solution of the lab with this name, such as "lab2_tensor_parallel"."""
    return _module("solutions", name)


def case_of(exercise: Exercise) -> Callable:
    """Import an exercise's case: the function that tests an answer.

    Args:
        exercise: an exercise of one of the labs.

    Returns: a function that takes a ``CaseRun``, calls the answer, and records in the CaseRun what it observes; the
        judge compares these observations with those of our solution.  Some mistakes show without this comparison; for
        these the function raises Wrong.  It returns None, or a text to show the learner if the answer is right.
    """
    return getattr(_module("cases", lab_of(exercise).name), exercise.case or exercise.function)


def mistakes_of(exercise: Exercise) -> Sequence[Mistake]:
    """Return the stated mistakes of an exercise, which we expect and which the judge can name, the likelier first."""
    return lab_of(exercise).mistakes.get(exercise.number, ())
