"""The notebooks in JupyterLab and Chromium, used as a reader uses them: by keyboard.

Every cell runs, every figure shows what a new drawing has, guesses are answered, and the page has nothing to complain
about.  A few chapters stand for all (stored_chapters.py); nbval runs the cells of every one.
"""

import copy

import nbformat
import pytest
from playwright.sync_api import expect

from actmem_course.figures.in_page import run_cell
from actmem_course.figures.live import WIDGET_MIME
from notebooks.site.slices import figures
from notebooks.source.build import NOTEBOOKS
from tests.notebooks.stored_chapters import IN_JUPYTERLAB, stored
from tests.notebooks.lab import LOST, OUTPUTS, Lab
from tests.notebooks.reader import use
from tests.tiers import sampled

CHAPTER = "02_counting_bytes.ipynb"
#: A plotly.js that holds the page for five seconds as it starts, as on a slow machine; figures are made meanwhile.
SLOW_PLOTLY = """
from actmem_course.figures import live
live._MODULE = "const end = performance.now() + 5000; while (performance.now() < end);" + live._MODULE
"""
SLOW_FIGURES = """
from actmem_course.figures.controls import steps
from actmem_course.figures.marks import Drawing
from actmem_course.figures import Panel
for number in range(12):
    display(Panel(lambda n: Drawing([], {"height": 100}, f"{n}."), n=steps("n", "number", (1, 2), 1)))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.stop()


def add(lab, name, *cells):
    """Write a notebook of a chapter's kind, with cells of one's own."""
    notebook = copy.deepcopy(stored(CHAPTER))
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, lab.folder / "notebooks" / name)


@pytest.mark.parametrize("name", sampled(IN_JUPYTERLAB, 0, always=IN_JUPYTERLAB[:1]))
def test_a_reader_uses_it(name, lab, browser):
    found = figures(stored(name))
    with lab.notebook(browser, name) as notebook:
        check_cells(notebook.run_all(), name)
        for number, cell in enumerate(cell for cell in stored(name).cells if cell.cell_type == "code"):
            if cell.id in found:
                use(notebook.go_to(number).locator(".actmem-shown"), run_cell(found[cell.id]))
        notebook.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        assert notebook.complaints == []
        assert notebook.page.locator(".Toastify__toast").all_inner_texts() == []  # JupyterLab asks the reader nothing
    check_the_next_day(lab, browser, name, len(found))


def check_the_next_day(lab, browser, name, at_least):
    """The saved notebook with a new kernel, which knows no widget of the one before: every figure has its picture."""
    tracked = {path: path.read_bytes() for path in NOTEBOOKS.glob("*.ipynb")}
    with lab.notebook(browser, name) as notebook:
        cells = notebook.page.evaluate(OUTPUTS)
        assert not any(WIDGET_MIME in output.get("data", {}) for cell in cells for output in cell["outputs"])
        assert WIDGET_MIME in (lab.folder / "notebooks" / name).read_text(
            encoding="utf-8"
        )  # for a page that is loaded again
        pictured = [
            number
            for number, cell in enumerate(cells)
            if any("image/png" in o.get("data", {}) for o in cell["outputs"])
        ]
        assert len(pictured) >= at_least
        for number in pictured:
            notebook.go_to(number).locator(".jp-RenderedImage img").first.wait_for()
        assert not notebook.page.get_by_text(LOST).count()
        assert notebook.complaints == []
    assert {path: path.read_bytes() for path in NOTEBOOKS.glob("*.ipynb")} == tracked


def check_cells(cells, name):
    assert [cell["count"] for cell in cells] == list(range(1, len(cells) + 1))
    wanted = [bool(cell.outputs) for cell in stored(name).cells if cell.cell_type == "code"]
    for cell, has_output in zip(cells, wanted, strict=True):
        bad = [o for o in cell["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
        assert not bad, (cell["source"], bad)
        assert bool(cell["outputs"]) == has_output, cell["source"]


@pytest.mark.nightly
def test_figures_take_changes_however_long_plotly_needs_to_start(lab, browser):
    add(lab, "slow.ipynb", SLOW_PLOTLY, SLOW_FIGURES)
    with lab.notebook(browser, "slow.ipynb") as notebook:
        page = notebook.page
        page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 3})
        notebook.run_all()
        places = notebook.go_to(1).locator(".actmem-shown")
        expect(places).to_have_count(12)
        for place in places.all():
            place.locator("input").focus()
            page.keyboard.press("ArrowRight")
            expect(place.locator(".actmem-plot")).to_have_attribute("aria-label", "2.")
        assert "[native code]" in page.evaluate("() => String(AbortSignal.timeout)"), "the page's own functions stay"
        assert notebook.complaints == []
