"""Cut a lab from its solution: ``python -m actmem.lab.cut`` rewrites labs/ from ``solutions``.

A public function keeps its signature and docstring and loses its body; a private function or
class goes; everything else stays.  So the two have one source, and a test holds them together.
"""

from __future__ import annotations

import ast
from pathlib import Path

from actmem.lab.judge.exercise import LABS
from actmem.lab.launch import LABS as LABS_FOLDER

SOLUTIONS = Path(__file__).parent / "solutions"


def cut(solution: str) -> str:
    """The source of a lab from the source of its solution."""
    lines = solution.splitlines()
    kept: list[str] = []
    end = 0  # lines before this one are dealt with
    for node in ast.parse(solution).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        before, end_before = lines[end:first], first
        end = node.end_lineno
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if is_definition and node.name.startswith("_"):
            continue
        kept += before
        if isinstance(node, ast.FunctionDef) and not _given(before):
            kept += lines[end_before : node.body[0].end_lineno] + ["    raise NotImplementedError"]
        else:
            kept += lines[end_before:end]
    return "\n".join(kept) + "\n"


def _given(before: list[str]) -> bool:
    """Whether the comment above a function says that the learner gets it whole."""
    return any(line.startswith("# given") for line in before)


def main() -> None:
    for name in LABS:
        source = SOLUTIONS / f"{name}.py"
        if source.exists():
            (LABS_FOLDER / source.name).write_text(cut(source.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
