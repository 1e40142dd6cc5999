"""Generate the labs' exercise files from our solutions, so that the two have one source.

In the exercise a public function keeps its signature and docstring and loses its body; private functions and classes
are left out; everything else stays. The lines that call the judge are added here, because the solutions can't have
them: the judge imports the solutions. After you edit a solution, run ``python -m actmem_course.strip_solutions``, which
writes labs/ again.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from actmem_course.launch import LABS

if TYPE_CHECKING:
    from actmem_course.judge.exercise import Lab

#: The lines above a lab's imports: the judge answers before torch is loaded, and the ranks load the file again.
_JUDGE_LINES = """
if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))
"""

SOLUTIONS = Path(__file__).parent / "judge" / "solutions"


def lab_names() -> list[str]:
    """Return the names of the labs to write, in the order of the course."""
    names = (path.stem for path in SOLUTIONS.glob("lab*.py"))
    return sorted(names, key=lambda name: int(name.partition("_")[0].removeprefix("lab")))


def lab_source(name: str) -> str:
    """Return the source text of a lab's exercise file, as a learner gets it.

    Args:
        name: the lab, from ``lab_names``, such as "lab2_tensor_parallel".
    """
    from actmem_course.judge.outline import load_lab  # the judge imports this module

    return with_readings(load_lab(name), cut((SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")))


def with_readings(lab: Lab, source: str) -> str:
    """Add to an exercise file which chapter to read, and above each exercise which section of that chapter to read.

    Args:
        lab: the lab, which names its chapter, and for each exercise the section.
        source: the exercise file's text, from ``cut``.

    Returns: the text with these lines added.
    """
    elsewhere = {task.number: f" in notebooks/{task.chapter}.ipynb" for task in lab.exercises if task.chapter}
    at = {task.number: f"“{task.section}”{elsewhere.get(task.number, '')}" for task in lab.exercises}
    read = f"Read notebooks/{lab.chapter}.ipynb first; each exercise names its section.\n\n"
    source = re.sub(r"^(?=Write the functions below)", read, source, count=1, flags=re.MULTILINE)
    return re.sub(r"^# (\d+\.\d+)\b.*$", lambda line: f"{line[0]}: read {at[line[1]]}", source, flags=re.MULTILINE)


def cut(solution: str) -> str:
    """Make an exercise file from its solution: replace the bodies of the functions to write by NotImplementedError.

    Functions whose comment above begins with "# given" stay whole; private ones are left out.  The lines that call the
    judge are added unless the solution has an ``if __name__ == …`` block of its own.

    Args:
        solution: the solution's source text.

    Returns: the exercise file's source text; ``with_readings`` adds to it which chapter and sections to read.
    """
    lines = solution.splitlines()
    kept: list[str] = []
    end = 0  # lines before this one are dealt with
    for node in ast.parse(solution).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        before, end_before = lines[end:first], first
        end = node.end_lineno or end
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.startswith("_"):
            continue
        kept += before
        is_given = any(line.startswith("# given") for line in before)  # the learner gets the function whole
        if isinstance(node, ast.FunctionDef) and not is_given:
            kept += lines[end_before : node.body[0].end_lineno] + ["    raise NotImplementedError"]
        else:
            kept += lines[end_before:end]
    lab = "\n".join(kept) + "\n"
    if "\nif __name__ ==" in lab:
        return lab
    docstring = ast.parse(lab).body[0].end_lineno or 0
    lines = lab.splitlines(keepends=True)
    return "".join(lines[:docstring]) + _JUDGE_LINES + "".join(lines[docstring:])


def main() -> None:
    """Write the exercise files of all labs again."""
    for name in lab_names():
        (LABS / f"{name}.py").write_text(lab_source(name), encoding="utf-8")


if __name__ == "__main__":
    main()
