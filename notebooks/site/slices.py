"""The code that a figure of a chapter needs, and no more: its cell, and what that takes from the cells before it."""

import ast

from nbformat import NotebookNode

from actmem_course.figures.in_page import SHOWN
from notebooks.site.needs import Reader, Statement


#: What measures, or reads what a GPU measured, works in no page, also where it needs no machine: such a figure stands still.
_NOT_IN_PAGES = ("actmem_course.lab_tools", "actmem_course.figures.gpu_results")


def figures(notebook: NotebookNode) -> dict[str, str]:
    """Code by cell id, for each cell that displays a figure which a page can draw without a machine."""
    reader = Reader()
    before: list[Statement] = []
    found = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        statements = reader.read(cell.source)
        before += statements
        if statements and _displays(statements[-1].node) and not statements[-1].measured:
            code = "\n".join(needed_for(before))
            if not any(package in code for package in _NOT_IN_PAGES):
                found[cell.id] = code
    return found


def _displays(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in SHOWN


def needed_for(statements: list[Statement]) -> list[str]:
    """The statements that the last one gets its values from, and itself."""
    kept: list[Statement] = []
    names = statements[-1].uses
    for one in reversed(statements[:-1]):
        if one.binds & names and not one.measured:
            kept.insert(0, one)
            names = (names - one.binds if one.always_binds else names) | one.uses
    return [one.text for one in (*kept, statements[-1])]
