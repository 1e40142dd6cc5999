"""Figures of the site that move without a notebook: what a page loads for them, and where they stand in it."""

import base64
import html
import json
import shutil
import zipfile
from pathlib import Path

from nbformat import NotebookNode

from actmem_course.figures.in_page import run_cell
from notebooks.site import cache
from notebooks.site.needs import needs_machine
from notebooks.site.slices import figures

SOURCE = cache.ROOT / "src"
FIGURES = SOURCE / "actmem_course" / "figures"
SCRIPTS = (FIGURES / "figures.js", *(Path(__file__).with_name(name) for name in ("live.js", "worker.js")))
#: Bars and lines only: a quarter of plotly.js.
PLOTLY = "plotly.js-basic-dist-min@4.1.1"
#: The interpreter, without the packages that its lock file would fetch from a server of its own: pages ask for none.
PYODIDE = "pyodide@314.0.6"
PYTHON_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
#: What the packages of a notebook's widgets are, which no page has.
WIDGETS = {"ipywidgets", "anywidget", "traitlets", "IPython"}
#: What the planner's peaks are read from, and the tables about others.
DATA = (SOURCE / "actmem_tools" / "tape" / "stage_tapes.json", *FIGURES.glob("*.tsv"), FIGURES / "template.json", *sorted((SOURCE / "actmem_course" / "others").glob("*.tsv")))
#: The front page's figure.
FRONT = """from actmem_course.figures import Panel, choice
from actmem_course.figures.ch01_memory_wall import METHODS, memory_wall
Panel(memory_wall, method=choice("method", METHODS, "tensor"))"""


def write_assets(folder: Path) -> None:
    """The scripts, plotly.js and the Python of all pages.  Raises cache.SiteError if a part can't be had."""
    (folder / "pictures").mkdir(parents=True)
    for path in SCRIPTS:
        shutil.copy(path, folder)
    shutil.copy(cache.npm_package(PLOTLY) / "plotly-basic.min.js", folder / "plotly.min.js")
    (folder / "pyodide").mkdir()
    for name in PYTHON_FILES:
        shutil.copy(cache.npm_package(PYODIDE) / name, folder / "pyodide")
    with zipfile.ZipFile(folder / "actmem.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (*modules(), *DATA):
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(SOURCE))), path.read_bytes(), zipfile.ZIP_DEFLATED)


def modules() -> list[Path]:
    """The files of the course that a page can load: prediction and drawings."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        part = parts[:-1] if parts[-1] == "__init__" else parts
        outside = part[0] == "actmem_course" and part[1:2] not in ((), ("others",), ("figures",), ("predicted",), ("results",))
        if not outside and not needs_machine(".".join(part), frozenset(WIDGETS)):
            found.append(path)
    return found


def write_cells(folder: Path, page: str, cells: dict[str, str], drawn: dict[str, dict] = {}) -> None:
    """The code of a page's figures, how they look before anything is moved, and the answers to its questions.

    drawn: by cell, figures that only a machine can compute, as it drew them.
    """
    known: dict[str, dict] = {cell: {"code": code, **run_cell(code).stored()} for cell, code in cells.items()}
    known |= {cell: {"state": {"controls": {}, "drawings": [drawing], "question": None}} for cell, drawing in drawn.items()}
    (folder / f"{page}.json").write_text(json.dumps(known), encoding="utf-8")


#: A browser loads no module from a file, so nothing else of a page could say this, and show the still picture.
FROM_A_FILE = """<script>
if (location.protocol === "file:") {
  const place = document.currentScript.previousElementSibling;
  place.innerHTML = place.textContent;
  place.insertAdjacentHTML("afterend", "<p class=actmem-message role=status>This figure stands still, because browsers run "
    + "no modules from files. It moves where a server shows the page: python3 -m http.server</p>");
}
</script>"""


def place(page: str, cell: str, picture: str, words: str, up: str = "") -> str:
    """Where a figure stands in a page.  Without JavaScript it is a picture, which no page with JavaScript loads."""
    still = f'<img class="actmem-picture dark-light" src="{up}live/pictures/{picture}.png" alt="{html.escape(words)}">'
    script = f'<script type="module" src="{up}live/live.js"></script>'
    return (
        f'<div class="actmem-shown" data-page="{page}" data-cell="{cell}"><noscript>{still}</noscript></div>'
        f"{FROM_A_FILE}{script}"
    )


def put_figures(notebook: NotebookNode, page: str, folder: Path) -> None:
    """Replace the outputs of figures by their places, and write what the page loads: code that draws them, or what a machine drew."""
    cells, drawn = figures(notebook), {}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "fingerprint" not in output.get("metadata", {}):
                continue
            words = " ".join(output.data["text/plain"].split())
            if cell.id not in cells:
                drawn[cell.id] = {**json.loads(output.metadata.drawing), "alt": words}
            (folder / "pictures" / f"{cell.id}.png").write_bytes(base64.b64decode(output.data["image/png"]))
            output.data, output.metadata = {"text/html": place(page, cell.id, cell.id, words, "../")}, {}
    write_cells(folder, page, cells, drawn)
