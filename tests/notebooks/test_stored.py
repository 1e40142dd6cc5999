"""Every stored notebook: run from its first cell to its last, without errors, small, and clean."""

import hashlib
import json
import re

import nbformat
import pytest

from actmem_course.figures.in_page import run_cell
from notebooks.site.slices import figures as figures_of
from notebooks.source.build import FOLDED, NOTEBOOKS, only_shows, outputs, sources, target
from notebooks.source.pictures import front_picture
from tests.notebooks.printed import MARKS, figures, long_texts, printed, printed_texts, visible_lines

PATHS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
FREE_GPUS = NOTEBOOKS / "free_gpus.ipynb"  # the notebook that is no chapter
of_chapters = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
#: Enough for a page that opens at once on a code-hosting site; nearly all of it is pictures.
LARGEST_BYTES = 600_000
MAP = "00_start_here.ipynb"
#: What the course asks one to read, over all chapters: printed texts, their lines, those as long as a table, and code.
#: A figure needs no table beside it; what a cell compares is a line of its own kind; code that only prints is folded.
#: Lines of code are at most 110 characters, so that no page clips them.
MOST_TEXTS, MOST_LINES, MOST_TABLES, MOST_CODE_LINES = 35, 70, 3, 780


@pytest.fixture(params=[*PATHS, FREE_GPUS], ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def test_every_source_has_its_notebook_and_every_notebook_its_source():
    assert sources() and [target(source) for source in sources()] == [*PATHS, FREE_GPUS]


def test_cells_were_run_in_order_from_a_new_kernel(notebook):
    """nbval compares no cell without a count, so each must have one."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert all(
            output.get("execution_count", cell.execution_count) == cell.execution_count for output in cell.outputs
        )


def test_nothing_went_wrong(notebook):
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


def test_it_is_small(path):
    assert path.stat().st_size < LARGEST_BYTES


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


def test_every_output_has_a_text_form(notebook):
    for output in outputs(notebook):
        if output.output_type != "stream":
            assert output.data.get("text/plain", "").strip() or "text/markdown" in output.data


def test_links_lead_somewhere(path, notebook):
    for link in re.findall(r"\]\(([^)#]+)", prose(notebook)):
        if not link.startswith("https://"):
            assert (path.parent / link).exists(), link


def test_the_map_names_every_notebook():
    text = json.dumps(nbformat.read(NOTEBOOKS / MAP, as_version=4), ensure_ascii=False)
    missing = [path.name for path in PATHS if path.name != MAP and f"({path.name})" not in text]
    assert not missing, f"add them to the map in notebooks/source/{MAP.replace('ipynb', 'py')}"


def test_the_map_has_the_minutes_that_each_chapter_says():
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOKS / MAP, as_version=4).cells)
    for path in PATHS:
        if path.name != MAP:
            (minutes,) = re.findall(r"(\d+) minutes\.", prose(nbformat.read(path, as_version=4)))
            assert re.search(rf"\({re.escape(path.name)}\)[^|]*\|[^|]*\| {minutes} \|", text), path.name


#: What else such a letter is: the paper's operators and matrices, rows of one token, a letter of another paper.
NO_SIZES = {"03": "fB", "04": "f", "12": "B"}


def prose(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def letters(notebook) -> dict[str, str]:
    """What a chapter says that its letters are, in a sentence, or in chapter 0 in a table."""
    text = prose(notebook)
    line = re.search(r"\*\*(?:Letters used|New letters?):\*\* (.*?)\.(?= |$)", " ".join(text.split()))
    table = dict(re.findall(r"^\| \$([^$]+)\$ \| `\w+` \| ([^|]*\w)", text, re.MULTILINE))
    return dict(re.findall(r"\$([^$]+)\$ ([^$,.:(]*[^$,.:(\s])", line[1])) if line else table


def in_formulas(text) -> set[str]:
    """Letters of its formulas, without words, commands and the d of a gradient."""
    formulas = "\n".join(map("".join, re.findall(r"\$\$(.*?)\$\$|\$([^$\n]+?)\$", text, re.DOTALL)))
    formulas = re.sub(r"\\(text|mathrm|begin|end)\{[^}]*\}|d(?=[A-Zxyzq]|\\(ell|gamma))", " ", formulas)
    return set(re.findall(r"\\kappa|(?<![\\a-zA-Z])[a-zA-Z]+", formulas)) - {""}


def test_a_letter_is_the_same_thing_in_every_chapter_that_lists_it():
    said = {path.name[:2]: letters(nbformat.read(path, as_version=4)) for path in PATHS}
    first = said.pop("00")
    assert first.keys() == set("sbhaLvtpm")
    meanings = {
        letter: {own[letter] for own in said.values() if letter in own} for own in said.values() for letter in own
    }
    assert {letter: each for letter, each in meanings.items() if len(each) > 1} == {}
    assert all(first.get(letter, each).startswith(each) for letter, (each,) in meanings.items())
    for path in PATHS:
        name, text = path.name[:2], prose(nbformat.read(path, as_version=4))
        used = {letter for word in in_formulas(text) for letter in ([word] if word[0] == "\\" else word)}
        known = first.keys() | said.get(name, {}).keys() | set(NO_SIZES.get(name, ""))
        assert used & (first.keys() | meanings.keys()) <= known, name
        assert not re.search(r"\^T|\\mathrm\{d\}|y = Wx", text), "transposes are ^\\top, gradients dX, a linear Y = XW"


def test_folded_answers_open_and_close(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert cell.source.count("<details") == cell.source.count("</details>") == cell.source.count("<summary>")


def test_the_readme_shows_todays_picture():
    assert front_picture().is_file(), "run make notebooks"
    shown = front_picture().relative_to(NOTEBOOKS.parent)
    assert f"]({shown})" in (NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")


@of_chapters
def test_a_chapter_opens_with_its_question_and_its_figure(notebook):
    first, second = notebook.cells[:2]
    assert first.cell_type == "markdown" and first.source.count("\n") < 6, "a title and one question"
    assert second.cell_type == "code" and second.source.endswith(")") and "Reveal(" in second.source


def test_cells_with_nothing_to_read_are_folded_and_so_is_every_answer(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    folded = [cell for cell in code if cell.metadata == FOLDED]
    assert all(cell in folded for cell in code if only_shows(cell.source))
    assert all(cell in folded for cell in code if "Prediction(" in cell.source)
    assert len(folded) < len(code)


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


def test_every_wait_for_processes_is_shown_and_table_2_is_measured_once():
    cells = [
        cell.source for path in PATHS for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    waiting = [source for source in cells if "results(" in source and "processes=" in source]
    assert len(waiting) >= 5 and all("with Progress(" in source for source in waiting)
    assert sum('results("measure_table2.py"' in source for source in cells) == 1


def test_the_course_shows_more_than_it_prints():
    stored = [nbformat.read(path, as_version=4) for path in PATHS]
    texts = [text for notebook in stored for text in printed_texts(notebook)]
    found = (
        len(texts),
        sum(len(text.splitlines()) for text in texts),
        sum(map(long_texts, stored)),
        sum(map(visible_lines, stored)),
    )
    shown = "python -m tests.notebooks.printed shows where"
    assert all(
        one <= most for one, most in zip(found, (MOST_TEXTS, MOST_LINES, MOST_TABLES, MOST_CODE_LINES), strict=True)
    ), (found, shown)


@of_chapters
def test_a_chapter_has_more_figures_than_tables(notebook):
    assert figures(notebook) > long_texts(notebook)


@of_chapters
def test_a_chapter_has_a_problem_to_work_out(path, notebook):
    """After its figures: the problem in a few sentences, then its answer, computed and folded."""
    before = [
        one
        for one, cell in zip(notebook.cells, notebook.cells[1:])
        if cell.cell_type == "code" and "\nworked(" in f"\n{cell.source}"
    ]
    assert len(before) == (path.name != MAP)
    assert all("## Work it out" in one.source for one in before)


@of_chapters
def test_all_comparisons_of_a_chapter_agree_and_its_end_sums_them_up(path, notebook):
    said = [line for text in map(printed, outputs(notebook)) for line in text.splitlines() if line.startswith(MARKS)]
    assert said and all(line.startswith("✓") for line in said), said
    if path.name != MAP:
        _, _, last = said[-1].partition("✓ 0 apart predicted = counted: ")
        equal, together = last.split(" of ")
        assert equal == together


@of_chapters
def test_no_visible_cell_shows_nothing(notebook):
    """What a cell compares stands under it; a definition ends with what it does."""
    visible = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.metadata != FOLDED]
    assert not [cell.source for cell in visible if not cell.outputs]


@of_chapters
def test_the_last_page_of_a_chapter_leads_on(path, notebook):
    following = [later.name for later in PATHS if later > path][:1]
    if following:
        last = notebook.cells[-1]
        assert last.cell_type == "markdown"
        _, _, end = last.source.partition("## Now fit your model")
        assert f"({following[0]})" in end
