"""Change every formula by its smallest step and see which notebook notices: python -m tests.notebooks.mutate

Each notebook is run once, in this process, and what its cells print is compared with what the
stored notebook says.  Then, for each change that ``sites`` offers, only the cells that the changed
value can reach run again, with the variables that they had, until one prints something else.
Cells that start processes are left out: their predictions are made in those processes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.notebooks.sites import Sites, instrument

SITES = Sites()


@dataclass
class Cell:
    """A code cell as it was run.  before: the variables at that time.  reached: the changes that can affect it.  reads: names that
    others gave it."""

    number: int
    code: ast.Module
    stored: str
    picture: str
    seconds: float = 0.0
    before: dict = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


def run(cell: Cell, variables: dict) -> tuple[str, object]:
    """What the cell prints and displays, as the stored notebook has it, and the value displayed; an error counts as a display."""
    *statements, last = cell.code.body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        shown = ""
        try:
            if isinstance(last, ast.Expr):
                exec(compile(ast.Module(statements, []), "cell", "exec"), variables)
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), variables)
                shown = "" if value is None else repr(value)
            else:
                exec(compile(cell.code, "cell", "exec"), variables)
        except Exception as error:
            shown = f"{type(error).__name__}: {error}"
    return printed.getvalue() + shown, value


def picture_of(value: object) -> str:
    """The fingerprint of the figures that a value displays, as the build notes it beside their picture."""
    figures = getattr(value, "figures", [value] if hasattr(value, "drawing") else [])
    return "-".join(figure.drawing.fingerprint() for figure in figures)


def cells_of(path) -> Iterator[Cell]:
    """The code cells of a stored notebook that start no processes."""
    import nbformat

    number = 0
    for stored in nbformat.read(path, as_version=4).cells:
        if stored.cell_type == "code":
            number += 1
            code = ast.parse(stored.source)
            names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
            text = "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in stored.outputs)
            cell = Cell(number, code, text, next((o.metadata.fingerprint for o in stored.outputs if "fingerprint" in o.get("metadata", {})), ""))
            cell.writes = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            cell.reads = {name.id for name in names if isinstance(name.ctx, ast.Load)} - cell.writes
            yield cell


def starts_processes(cell: Cell) -> bool:
    calls = [node.func for node in ast.walk(cell.code) if isinstance(node, ast.Call)]
    return any(getattr(call, "id", getattr(call, "attr", "")) == "results" for call in calls)


class Chapter:
    """One notebook, run once."""

    def __init__(self, path):
        self.name = path.stem
        self.cells: list[Cell] = []
        self.wrong: list[str] = []
        missing: set[str] = set()
        variables: dict = {"__name__": "__main__"}
        for cell in cells_of(path):
            if starts_processes(cell) or cell.reads & missing:
                imports: list[ast.stmt] = [node for node in cell.code.body if isinstance(node, (ast.Import, ast.ImportFrom))]
                exec(compile(ast.Module(imports, []), "cell", "exec"), variables)
                missing |= cell.writes
                continue
            missing -= cell.writes
            cell.before = dict(variables)
            SITES.reached = set()
            start = time.perf_counter()
            text, value = run(cell, variables)
            cell.seconds, cell.reached = time.perf_counter() - start, SITES.reached
            if text != cell.stored:
                self.wrong.append(f"{self.name}, cell {cell.number}: not what is stored:\n{text}")
            if picture_of(value) != cell.picture:
                self.wrong.append(f"{self.name}, cell {cell.number}: the stored picture is of another figure")
            self.cells.append(cell)

    def price(self, change: str) -> float:
        """Roughly how many seconds this chapter takes for a change."""
        return sum(cell.seconds for cell in self.cells if change in cell.reached)

    def notices(self, change: str) -> int | None:
        """The number of the first cell that prints something else under a change; None if none does."""
        SITES.chosen = change
        new: dict = {}
        try:
            for cell in self.cells:
                if change in cell.reached or cell.reads & new.keys():
                    variables = {**cell.before, **new}
                    if run(cell, variables)[0] != cell.stored:
                        return cell.number
                    new |= {name: variables[name] for name in cell.writes if name in variables}
        finally:
            SITES.chosen = ""
        return None


def mutate(every_chapter: bool = False, progress=lambda share: None) -> dict:
    """changes: for each change the cells that notice it, as (chapter, cell).  unreached: places that no cell came to.
    wrong: cells that print something else than stored without any change."""
    from notebooks.source.build import NOTEBOOKS

    os.chdir(NOTEBOOKS)
    instrument(SITES)
    chapters = [Chapter(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    changes = sorted(set().union(*(cell.reached for chapter in chapters for cell in chapter.cells)))
    noticed: dict[str, list] = {}
    for done, change in enumerate(changes):
        progress(done / len(changes))
        noticed[change] = []
        able = [chapter for chapter in chapters if any(change in cell.reached for cell in chapter.cells)]
        for chapter in sorted(able, key=lambda chapter: chapter.price(change)):
            cell = chapter.notices(change)
            if cell is not None:
                noticed[change].append((chapter.name, cell))
                if not every_chapter:
                    break
    unreached = [name for place, name in enumerate(SITES.places) if place not in SITES.visited]
    return {"changes": noticed, "unreached": unreached, "wrong": [text for chapter in chapters for text in chapter.wrong]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks.mutate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--every-chapter", action="store_true", help="do not stop at the first chapter that notices")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(mutate(options.every_chapter)))
        return 0
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("changing formulas", total=1.0)
        found = mutate(options.every_chapter, lambda share: bar.update(task, completed=share))
    table = Table("one more in", "noticed by chapter, cell", title=f"{len(found['changes'])} changes")
    for change, by in found["changes"].items():
        table.add_row(change, ", ".join(f"{name[:2]}: {cell}" for name, cell in by) or "[bold red]nobody")
    for place in found["unreached"]:
        table.add_row(place, "[bold red]never computed")
    Console().print(table)
    for text in found["wrong"]:
        Console().print(f"[red]{text}")
    return int(bool(found["unreached"] or found["wrong"] or not all(found["changes"].values())))


if __name__ == "__main__":
    sys.exit(main())
