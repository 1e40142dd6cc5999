"""Every stored notebook: run from its first cell to its last, without errors, small, and clean."""

import hashlib
import re

import nbformat
import pytest

from actmem_course.figures.in_page import run_cell
from notebooks.site.slices import figures as figures_of
from notebooks.source.build import FOLDED, NOTEBOOKS, outputs, sources, target

PATHS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
FREE_GPUS = NOTEBOOKS / "free_gpus.ipynb"  # the notebook that is no chapter
of_chapters = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
#: What the line of a comparison begins with (figures/checks.py).
MARKS = ("✓", "✗")


@pytest.fixture(params=[*PATHS, FREE_GPUS], ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def test_cells_were_run_in_order_from_a_new_kernel(notebook):
    """nbval compares no cell without a count, so each must have one."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert all(
            output.get("execution_count", cell.execution_count) == cell.execution_count for output in cell.outputs
        )


def test_it_is_valid_and_has_no_widget_state_no_times_and_no_machine(path, notebook):
    nbformat.validate(notebook)
    text = path.read_text(encoding="utf-8")
    for word in (
        "widget-state",
        "widget-view",
        "iopub",
        "model_id",
        f"{NOTEBOOKS.parent}/",
        "/home/",
        "/tmp/",
        "/root/",
        " object at 0x",
    ):
        assert word not in text, word
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_every_figure_has_its_picture_and_its_words_and_one_without_controls_its_drawing(notebook):
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "fingerprint" in output.get("metadata", {}):
                assert "image/png" in output.data, "build it where Chromium is installed"
                assert len(output.data["text/plain"]) > 40
                assert ("drawing" in output.metadata) == ("LiveFigure(" in cell.source)
                if "drawing" in output.metadata:
                    assert (
                        hashlib.sha256(output.metadata.drawing.encode()).hexdigest()[:16] == output.metadata.fingerprint
                    )


@of_chapters
def test_a_chapter_opens_before_its_answer(notebook):
    """The figure stands where the question begins: what is stored of it has not the answer's number."""
    cell = notebook.cells[1]
    (output,) = cell.outputs
    question = run_cell(figures_of(notebook)[cell.id])
    answer = question.question.reply().partition("\n")[0].removeprefix("It is ").removesuffix(".")
    text = output.data["text/plain"]
    assert text.startswith("Your prediction: ") and "image/png" in output.data
    assert not re.search(rf"(?<![\d.,]){re.escape(answer)}", text), answer
    assert question.shows and question.question.line, "an answer moves the figure, and the guess is in it"


@of_chapters
def test_all_comparisons_of_a_chapter_agree_and_its_end_sums_them_up(notebook):
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook)]
    said = [line for text in texts for line in text.splitlines() if line.startswith(MARKS)]
    assert said and all(line.startswith("✓") for line in said), said
    _, _, last = said[-1].partition("✓ 0 apart predicted = counted: ")
    equal, together = last.split(" of ")
    assert equal == together
