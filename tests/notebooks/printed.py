"""What a stored chapter asks a reader to read: printed tables and visible code: python -m tests.notebooks.printed"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import zip_longest

from nbformat import NotebookNode

from notebooks.source.build import FOLDED, outputs

_RULE = re.compile("─+")
_GAP = re.compile(" {2,}")


def tables(text: str) -> list[int]:
    """For each table in a printed text, how many columns it has; columns stand two spaces apart or more.

    A table is a header above a rule (the rule above its sum, the line "together", begins no table), or, without a
    rule, a header of three names and more, with no digit in them, above a line with as many cells at least.
    """
    found, in_body = [], False
    lines = text.splitlines()
    for above, line, below in zip(["", *lines], lines, [*lines[1:], ""]):
        names, cells = (_GAP.split(one.strip()) for one in (line, below))
        if not line.strip():
            in_body = False
        elif _RULE.fullmatch(line) and above.strip():
            if not (in_body and below.startswith("together")):
                found.append(_columns(above, below.ljust(len(line))))
            in_body = True
        elif not in_body and 3 <= len(names) <= len(cells) and not re.search(r"\d", line):
            found.append(len(names))
            in_body = True
    return found


def _columns(header: str, first: str) -> int:
    """Columns of a table: what is blank both in its header and in its first line, two spaces or wider, lies between columns."""
    together = "".join(" " if letters == (" ", " ") else "x" for letters in zip_longest(header, first, fillvalue=" "))
    return len(_GAP.split(together.strip()))


def printed_tables(notebook: NotebookNode) -> list[int]:
    """The columns of every table that a notebook prints."""
    return [columns for output in outputs(notebook) for columns in tables(printed(output))]


def visible_lines(notebook: NotebookNode) -> int:
    """Lines of code, without the empty ones, in the cells that are not folded."""
    return sum(len(list(_written(cell.source))) for cell in notebook.cells if cell.cell_type == "code" and cell.metadata != FOLDED)


def _written(source: str) -> Iterable[str]:
    return (line for line in source.splitlines() if line.strip())


def printed_texts(notebook: NotebookNode) -> list[str]:
    """What a notebook prints: every text that is neither a figure's alt text, nor a question or its folded answer, nor a wait for processes."""
    shown = (output for output in outputs(notebook) if "image/png" not in output.get("data", {}))
    return [text for output in shown if (text := printed(output).rstrip()) and not text.startswith(("Your prediction: ", "labs/")) and text != "Answer"]


def figures(notebook: NotebookNode) -> int:
    """The figures of a notebook."""
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def printed(output: NotebookNode) -> str:
    """What one output is as text: what was printed, or what a picture says in words."""
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def main() -> None:
    import nbformat

    from notebooks.source.build import sources, target

    sums = [0, 0, 0, 0]
    for source in sources():
        notebook = nbformat.read(target(source), as_version=4)
        texts = printed_texts(notebook)
        found = (len(texts), sum(len(text.splitlines()) for text in texts), len(printed_tables(notebook)), visible_lines(notebook))
        sums = [before + own for before, own in zip(sums, found)]
        print(f"{source.stem}: prints {found[0]} times, {found[1]} lines, {found[2]} tables; {found[3]} lines of code; {figures(notebook)} figures")
    print(f"together: prints {sums[0]} times, {sums[1]} lines, {sums[2]} tables; {sums[3]} lines of code")


if __name__ == "__main__":
    main()
