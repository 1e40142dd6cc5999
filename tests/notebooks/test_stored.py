"""Every stored notebook: run from its first cell to its last, without errors, small, and clean."""

import json
import re

import nbformat
import pytest

from notebooks.source.build import NOTEBOOKS, only_shows, outputs, sources, target
from notebooks.source.pictures import front_picture

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
#: Enough for a page that opens at once on a code-hosting site.
LARGEST_BYTES = 600_000
MAP = "00_start_here.ipynb"


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def test_every_source_has_its_notebook_and_every_notebook_its_source():
    assert sources() and [target(source) for source in sources()] == PATHS


def test_cells_were_run_in_order_from_a_new_kernel(notebook):
    """nbval compares no cell without a count, so each must have one."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert all(output.get("execution_count", cell.execution_count) == cell.execution_count for output in cell.outputs)


def test_nothing_went_wrong(notebook):
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


def test_it_is_small(path):
    assert path.stat().st_size < LARGEST_BYTES


def test_it_is_valid_and_has_no_widget_state_no_times_and_no_machine(path, notebook):
    nbformat.validate(notebook)
    text = path.read_text(encoding="utf-8")
    for word in ("widget-state", "widget-view", "iopub", "model_id", f"{NOTEBOOKS.parent}/", "/home/", "/tmp/", "/root/", " object at 0x"):
        assert word not in text, word
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_every_figure_has_its_picture_and_its_words(notebook):
    for output in outputs(notebook):
        if "fingerprint" in output.get("metadata", {}):
            assert "image/png" in output.data, "build it where Chromium is installed"
            assert len(output.data["text/plain"]) > 40


def test_every_output_has_a_text_form(notebook):
    for output in outputs(notebook):
        if output.output_type != "stream":
            assert output.data.get("text/plain", "").strip() or "text/markdown" in output.data


def test_links_lead_somewhere(path, notebook):
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#]+)", prose):
        if not link.startswith("https://"):
            assert (path.parent / link).exists(), link


def test_the_map_names_every_notebook():
    text = json.dumps(nbformat.read(NOTEBOOKS / MAP, as_version=4), ensure_ascii=False)
    missing = [path.name for path in PATHS if path.name != MAP and f"({path.name})" not in text]
    assert not missing, f"add them to the map in notebooks/source/{MAP.replace('ipynb', 'py')}"


def test_folded_answers_open_and_close(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert cell.source.count("<details") == cell.source.count("</details>") == cell.source.count("<summary>")


def test_the_readme_shows_todays_picture():
    assert front_picture().is_file(), "run make notebooks"
    shown = front_picture().relative_to(NOTEBOOKS.parent)
    assert f"]({shown})" in (NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")


def test_a_chapter_opens_with_its_question_and_its_figure(notebook):
    first, second = notebook.cells[:2]
    assert first.cell_type == "markdown" and first.source.count("\n") < 6, "a title and one question"
    assert second.cell_type == "code" and second.source.endswith(")") and "Reveal(" in second.source


def test_cells_with_nothing_to_read_are_folded_and_so_is_every_answer(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    folded = [cell for cell in code if cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert all(only_shows(cell.source) == (cell in folded) for cell in code)
    assert all(cell in folded for cell in code if "Prediction(" in cell.source)
    assert len(folded) < len(code)


def test_no_stored_output_gives_an_answer_away(notebook):
    """The figure of a guess is not stored: its title has the answer."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and "Reveal(" in cell.source:
            (output,) = cell.outputs
            assert set(output.data) == {"text/plain"} and output.data["text/plain"].startswith("Your prediction: ")


def test_every_wait_for_processes_is_shown_and_table_2_is_measured_once():
    cells = [cell.source for path in PATHS for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    waiting = [source for source in cells if "results(" in source and "processes=" in source]
    assert len(waiting) >= 5 and all("with Progress(" in source for source in waiting)
    assert sum('results("measure_table2.py"' in source for source in cells) == 1
