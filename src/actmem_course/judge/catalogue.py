"""The labs: which a file is, its exercises, and our solutions."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

from actmem.config import ConfigError
from actmem_course.judge.exercise import Lab
from actmem_course.judge.outline import ALL_LABS

LAB_NAMES = tuple(lab.name for lab in ALL_LABS)


def lab_name(script: Path, doc: str) -> str:
    """Which lab a learner's file is: by its name, or if it has another one, by the line "Lab 2: …" of its docstring.

    Raises ConfigError if neither says so.
    """
    said = re.search(r"^Lab (\d+):", doc, re.MULTILINE) or re.match(r"lab(\d+)", script.stem)
    by_number = {name.partition("_")[0]: name for name in LAB_NAMES}
    name = script.stem if script.stem in LAB_NAMES else by_number.get(f"lab{said[1]}" if said else "")
    if name is None:
        raise ConfigError(
            "file",
            f'which lab is it?  Name it as it was, or begin its docstring with "Lab 1: …" (1 to {len(LAB_NAMES)})',
        )
    return name


def load_lab(name: str) -> Lab:
    """The lab of that file name.  Raises ConfigError if there is none."""
    found = next((lab for lab in ALL_LABS if lab.name == name), None)
    if found is None:
        raise ConfigError("lab", f"the judge knows {', '.join(LAB_NAMES)}; this file is {name}")
    return found


def solution_module(name: str) -> ModuleType:
    """Our own solution."""
    return importlib.import_module(f"actmem_course.judge.solutions.{name}")


def solutions_of(name: str) -> dict:
    """What our own solution's module defines, by name."""
    return vars(solution_module(name))


def cases_of(name: str) -> ModuleType:
    """A lab's cases and its table of mistakes."""
    return importlib.import_module(f"actmem_course.judge.cases.{name}")
