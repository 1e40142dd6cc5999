"""A stored notebook as a browser can run it, without torch and without processes.

Cells that need a real machine become text: their code, and what they printed when the notebook
was built.  The other cells stay unchanged, except for imports that would fail.
"""

from __future__ import annotations

import ast

import nbformat
from nbformat import NotebookNode

from notebooks.site.needs import Reader, Statement

#: The kernel that JupyterLite brings.
KERNEL = {"kernelspec": {"name": "python", "display_name": "Python (Pyodide)", "language": "python"}, "language_info": {"name": "python"}}
#: The tag of cells that replace one that needs a machine, for styling and counting.
MEASURED_TAG = "measured"

INTRODUCTION = """
> **This page runs in your browser**, with a Python that came with the page; nothing is sent anywhere. Choose *Run → Run All Cells*: the
> first cell waits until Python has started, some 10 to 30 seconds. Then the sliders move with the mouse or the arrow keys.
>
> Cells that need PyTorch or several processes can't run here; they are shown with what they printed on a real machine.
> To run them too, install the course: its front page says how.
""".strip()

MEASURED = "**Measured on a real machine.** This cell needs PyTorch or processes of its own, which a browser does not have:"
PRINTED = "It printed:"


def for_browser(stored: NotebookNode) -> NotebookNode:
    """The browser's version of a stored notebook.  Changes nothing in ``stored``."""
    reader = Reader()
    cells = [(cell, reader.read(cell.source) if cell.cell_type == "code" else []) for cell in nbformat.from_dict(stored).cells]
    made: list[NotebookNode] = []
    read_later: set[str] = set()
    for cell, statements in reversed(cells):
        made[:0] = _code(cell, statements, read_later) if cell.cell_type == "code" else [cell]
        _, read_later = _needed([one for one in statements if not one.measured], read_later, keep_all=True)
    made.insert(1, nbformat.v4.new_markdown_cell(INTRODUCTION, id="in-the-browser"))
    return nbformat.v4.new_notebook(cells=made, metadata=KERNEL)


def _code(cell: NotebookNode, statements: list[Statement], read_later: set[str]) -> list[NotebookNode]:
    """What replaces a code cell.  read_later: names that the cells after it read and don't set first."""
    free = [one for one in statements if not one.measured]
    if len(free) == len(statements):
        return [cell]
    if all(one.only_defines for one in statements if one.measured):
        missing = sorted({name for one in statements if one.measured for name in one.binds})
        cell.source = f"# Not in the browser: {', '.join(missing)}.\n{_source(free)}"
        return [cell] if free else []
    kept, _ = _needed(free, read_later)
    text = [_measured(cell)]
    if kept:
        source = f"# The part of this cell that runs in a browser; later cells use it.\n{_source(kept)}"
        text.append(nbformat.v4.new_code_cell(source, id=f"{cell.id}-rest"))
    return text


def _needed(statements: list[Statement], names: set[str], keep_all: bool = False) -> tuple[list[Statement], set[str]]:
    """The statements that ``names`` get their values from, and the names that have to have values before them."""
    kept: list[Statement] = []
    for one in reversed(statements):
        if keep_all or one.binds & names:
            names = (names - one.binds if one.always_binds else names) | one.uses
            kept.insert(0, one)
    return kept, names


def _source(statements: list[Statement]) -> str:
    """The statements as code, names from one module on one line again."""
    lines: list[str] = []
    for one in statements:
        start, _, name = one.text.partition(" import ")
        if isinstance(one.node, ast.ImportFrom) and lines and lines[-1].startswith(f"{start} import "):
            lines[-1] += f", {name}"
        else:
            lines.append(one.text)
    return "\n".join(lines)


def _measured(cell: NotebookNode) -> NotebookNode:
    """A code cell as text, with its stored output."""
    parts = [MEASURED, f"```python\n{cell.source}\n```"]
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            # Not an attachment of the cell: browsers complain of its address before JupyterLab replaces it.
            picture = "".join(data["image/png"].split())
            parts.append(f"![{_one_line(data['text/plain'])}](data:image/png;base64,{picture})")
        elif "text/markdown" in data:
            parts.append(data["text/markdown"])
        else:
            parts += [PRINTED, f"```\n{(output.get('text') or data['text/plain']).rstrip()}\n```"]
    return nbformat.v4.new_markdown_cell("\n\n".join(parts), id=cell.id, metadata={"tags": [MEASURED_TAG]})


def _one_line(text: str) -> str:
    """For the alt text of a picture in Markdown."""
    return " ".join(text.split()).replace("[", "(").replace("]", ")")
