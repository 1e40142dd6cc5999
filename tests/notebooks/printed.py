"""What a stored chapter asks a reader to read: printed texts and visible code: python -m tests.notebooks.printed"""

from __future__ import annotations

from nbformat import NotebookNode

from notebooks.source.build import FOLDED, outputs

#: What the line of a comparison begins with (figures/checks.py).
MARKS = ("✓", "✗", "– not counted")
#: A printed text with more lines than this is a table, or as long as one.
_SHORT = 3


def printed(output: NotebookNode) -> str:
    """What one output is as text: what was printed, or what a picture says in words."""
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def printed_texts(notebook: NotebookNode) -> list[str]:
    """What a notebook prints, less figures' alt texts, questions and folded answers, waits for processes, and checks."""
    shown = (output for output in outputs(notebook) if "image/png" not in output.get("data", {}))
    texts = filter(None, (printed(output).rstrip() for output in shown))
    return [text for text in texts if not text.startswith(("Your prediction: ", "labs/", *MARKS)) and text != "Answer"]


def long_texts(notebook: NotebookNode) -> int:
    """How many of them are as long as a table."""
    return sum(len(text.splitlines()) > _SHORT for text in printed_texts(notebook))


def visible_lines(notebook: NotebookNode) -> int:
    """Lines of code, without the empty ones, in the cells that are not folded."""
    seen = (cell for cell in notebook.cells if cell.cell_type == "code" and cell.metadata != FOLDED)
    return sum(bool(line.strip()) for cell in seen for line in cell.source.splitlines())


def figures(notebook: NotebookNode) -> int:
    """The figures of a notebook."""
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def main() -> None:
    import nbformat

    from notebooks.source.build import sources, target

    sums = [0, 0, 0, 0, 0]
    for source in sources():
        notebook = nbformat.read(target(source), as_version=4)
        texts = printed_texts(notebook)
        found = (len(texts), sum(len(text.splitlines()) for text in texts), long_texts(notebook), visible_lines(notebook), figures(notebook))
        sums = [before + own for before, own in zip(sums, found)]
        print("{}: prints {} times, {} lines, {} long; {} lines of code; {} figures".format(source.stem, *found))
    print("together: prints {} times, {} lines, {} long; {} lines of code; {} figures".format(*sums))


if __name__ == "__main__":
    main()
