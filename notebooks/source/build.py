"""Build the notebooks: python -m notebooks.source.build

Each notebook has one source, ``notebooks/source/NN_name.py`` in percent format, which is run from
its first cell to its last; what it displays is stored in ``notebooks/NN_name.ipynb``.  The same
source gives the same file, byte by byte, on every run: cells have fixed names, and times, widget
states and what differs between machines is not stored.  Pictures of figures are drawn
by Chromium, and only of figures that changed; without Chromium they are left out.
"""

import argparse
import ast
import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from actmem_course.figures.in_page import SHOWN
from actmem_course.figures.live import PICTURE_MIME, PICTURES, WIDGET_MIME
from notebooks.source.kernels import AsyncPrivateKernelManager
from notebooks.source.pictures import PICTURES as FOLDER
from notebooks.source.pictures import WIDTH, Painter, chromium, front_drawing, front_picture

SOURCES = Path(__file__).resolve().parent
NOTEBOOKS = SOURCES.parent
CELL_TIMEOUT_SECONDS = 600
#: A cell whose code teaches nothing says so itself: ``# %% jupyter={"source_hidden": true}``.
FOLDED = {"jupyter": {"source_hidden": True}}
PYTHON = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"},
}


def sources() -> list[Path]:
    """The sources of all notebooks: the chapters in their order, then the one for borrowed GPUs."""
    return [*sorted(SOURCES.glob("[0-9][0-9]_*.py")), SOURCES / "free_gpus.py"]


def target(source: Path) -> Path:
    """The notebook that is built from a source."""
    return NOTEBOOKS / f"{source.stem}.ipynb"


def read(source: Path) -> NotebookNode:
    """The cells of a source, without outputs, each named after its contents."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(PYTHON)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    named: set[str] = set()
    for cell in notebook.cells:
        name = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        while name in named:  # the same contents twice
            name = hashlib.sha256(name.encode()).hexdigest()[:8]
        named.add(name)
        cell.id = name
        marked = cell.metadata.get("jupyter") == FOLDED["jupyter"]
        plumbing = marked or (cell.cell_type == "code" and only_shows(cell.source))
        cell.metadata = nbformat.from_dict(FOLDED if plumbing else {})
    return notebook


def only_shows(source: str) -> bool:
    """Whether a cell has nothing to read: imports, names for what it shows, and the widget that it shows."""
    return all(
        isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in SHOWN)
        for node in ast.parse(source).body
    )


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run all cells in a new kernel.  Raises nbclient's CellExecutionError at the first that fails."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECONDS,
        kernel_manager_class=AsyncPrivateKernelManager,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute(env={**os.environ, PICTURES: "1"})


def tidy(notebook: NotebookNode, painter: Painter | None, old: dict[str, str]) -> None:
    """Keep of the outputs what is the same on every run, and add the pictures.

    A figure without controls keeps its drawing as well, for pages that can't run what it shows.
    old: pictures by the fingerprint of what they show.  Without a painter, a changed figure has no picture.
    """
    for cell, output in ((cell, output) for cell in notebook.cells for output in cell.get("outputs", ())):
        data, metadata = output.get("data", {}), output.get("metadata", {})
        data.pop(WIDGET_MIME, None)
        if metadata.pop("varies", False):
            data.pop("text/html", None)
        specs = data.pop(PICTURE_MIME, None)
        if specs:
            fingerprint = metadata["fingerprint"] = "-".join(spec.pop("fingerprint") for spec in specs)
            picture = old.get(fingerprint) or (painter.paint(specs) if painter else None)
            if "LiveFigure(" in cell.source:
                metadata["drawing"] = json.dumps(*specs, sort_keys=True)  # in one line of the file
            if picture:
                data["image/png"], metadata["image/png"] = picture, {"width": WIDTH}
    notebook.metadata = nbformat.from_dict(PYTHON)  # not the version of the kernel, nor widgets' states


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """The outputs of all code cells."""
    return (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


def stored_pictures(path: Path) -> dict[str, str]:
    """Pictures of a stored notebook, by the fingerprint of what they show."""
    if not path.exists():
        return {}
    stored = nbformat.read(path, as_version=4)
    return {
        output.metadata.fingerprint: output.data["image/png"]
        for output in outputs(stored)
        if "image/png" in output.get("data", {}) and "fingerprint" in output.metadata
    }


def without_pictures(notebook: NotebookNode) -> NotebookNode:
    """A copy to compare with: all but the pictures, whose fingerprints stay."""
    copy = nbformat.from_dict(notebook)
    for output in outputs(copy):
        for part in ("data", "metadata"):
            output.get(part, {}).pop("image/png", None)
    return copy


def build(source: Path, painter: Painter | None = None) -> NotebookNode:
    """The finished notebook of one source.  Writes nothing."""
    notebook = execute(read(source))
    tidy(notebook, painter, stored_pictures(target(source)))
    return notebook


def write(notebook: NotebookNode, path: Path) -> None:
    """Store a notebook as the other tools would: one space of indentation, one newline at the end."""
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m notebooks.source.build", description=__doc__.split("\n\n")[1])
    parser.add_argument("names", nargs="*", help="notebooks to build, such as 02 (default: all)")
    names = parser.parse_args().names
    chosen = [source for source in sources() if not names or any(source.stem.startswith(name) for name in names)]
    if not chosen:
        parser.error(f"no source in {SOURCES} begins with {' or '.join(names)}")
    browser = chromium()
    if browser is None:
        print("WARNING: no Chromium (apt-get install chromium): figures that changed get no picture", file=sys.stderr)
    with Painter(browser) if browser else nullcontext() as painter:
        for source in chosen:
            path = target(source)
            try:
                write(build(source, painter), path)
            except CellExecutionError as error:
                print(f"{source.name}: a cell failed, and {path.name} stays as it was\n{error}", file=sys.stderr)
                return 1
            print(f"{path.name}: {path.stat().st_size / 1000:,.0f} kB")
        if painter and not front_picture().exists():
            paint_front(painter)
    return 0


def paint_front(painter: Painter) -> None:
    """Draw the README's picture anew, and delete the one before it."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("memory_wall_*.png"):
        old.unlink()
    front_picture().write_bytes(base64.b64decode(painter.paint([front_drawing().spec()])))
    print(f"{front_picture().name}: name it in README.md")


if __name__ == "__main__":
    sys.exit(main())
