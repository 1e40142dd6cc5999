"""Which cells of a chapter a browser can run is read from the code, and what stands for the others."""

import ast

import nbformat
import pytest

from notebooks.site.book import chapters
from notebooks.site.browser import INTRODUCTION, MEASURED_TAG, for_browser
from notebooks.site.live import SOURCE, modules
from notebooks.site.needs import Reader, needs_machine


def test_a_page_has_all_that_its_modules_import():
    shipped = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in modules()}
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("actmem"):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                assert node.module in shipped and (names & shipped or not (SOURCE / node.module.replace(".", "/")).is_dir()), (path, node.module)


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("torch", True),
        ("torch.nn", True),
        ("numpy", True),
        ("subprocess", True),
        ("math", False),
        ("actmem", False),
        ("actmem.record", True),  # loaded when it is asked for
        ("actmem_course.others.paper", False),
        ("actmem.formulas.activations.eq1", False),
        ("actmem_course.show.widgets.Panel", False),
        ("actmem.measure.record", True),
        ("actmem.layers.transformer", True),
        ("actmem_course.launch.results", True),  # starts processes
        ("actmem.pipeline", True),
    ],
)
def test_modules_that_need_a_machine(module, needed):
    assert needs_machine(module) == needed


@pytest.mark.parametrize(
    ("cells", "measured"),
    [
        (["import math\nx = math.pi", "print(x)"], [[0, 0], [0]]),
        (["import torch\nx = torch.ones(2)", "y = x", "y = 1", "print(y)"], [[1, 1], [1], [0], [0]]),
        (["from actmem.measure import record", "f = lambda: record", "f()"], [[1], [1], [1]]),
        (["from actmem.measure import record as r\nfrom actmem.rows import total", "r", "total"], [[1, 0], [1], [0]]),
        (["import torch", "lines = []", "lines.append(torch.ones(1))", "print(lines)"], [[1], [0], [1], [1]]),
        (["import torch", "d = {}", "d['x'] = torch.ones(1)", "d"], [[1], [0], [1], [1]]),
        (["import torch", "d = {}", "d['x'] = 1", "d"], [[1], [0], [0], [0]]),
        (["import torch\ndef f():\n    return torch.ones(1)", "def g():\n    return f()", "g()"], [[1, 1], [1], [1]]),
        (["def f():\n    import torch\n    return torch.ones(1)", "f()"], [[1], [1]]),
        (["import torch\nx = torch.ones(1)", "[x for x in range(3)]", "x"], [[1, 1], [1], [1]]),
        (["import torch\nx = torch.ones(1)", "def f():\n    x = 2", "x"], [[1, 1], [0], [1]]),
    ],
)
def test_what_comes_from_a_machine_is_followed(cells, measured):
    reader = Reader()
    assert [[int(one.measured) for one in reader.read(cell)] for cell in cells] == measured


def notebook(*sources):
    cells = [nbformat.v4.new_markdown_cell("# Title")]
    for number, source in enumerate(sources):
        output = nbformat.v4.new_output("stream", text=f"printed {number}\n")
        cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", outputs=[output]))
    return nbformat.v4.new_notebook(cells=cells)


def code(made):
    return [cell.source for cell in made.cells if cell.cell_type == "code"]


def test_a_cell_that_needs_nothing_is_left_as_it_is():
    stored = notebook("x = 1  # with its comment\nprint(x)")
    assert for_browser(stored).cells[2] == stored.cells[1]
    assert for_browser(stored).cells[1].source == INTRODUCTION


def test_imports_that_would_fail_are_left_out_by_name():
    made = for_browser(notebook("import torch\nfrom actmem.rows import compare, total\nfrom actmem.measure import record", "total"))
    assert code(made) == ["# Not in the browser: record, torch.\nfrom actmem.rows import compare, total", "total"]


def test_a_measured_cell_becomes_text_with_what_it_printed():
    made = for_browser(notebook("import torch\nprint(torch.ones(1))"))
    (cell,) = [cell for cell in made.cells if MEASURED_TAG in cell.metadata.get("tags", [])]
    assert cell.cell_type == "markdown" and "print(torch.ones(1))" in cell.source and "printed 0" in cell.source
    assert code(made) == []


def test_what_later_cells_need_of_a_measured_cell_still_runs():
    made = for_browser(notebook("import torch\na = 1\nb = a + 1\nc = 7\nlines = []\nprint(torch.ones(b))", "print(b)", "lines = [3]\nprint(lines)"))
    assert code(made) == ["# The part of this cell that runs in a browser; later cells use it.\na = 1\nb = a + 1", "print(b)", "lines = [3]\nprint(lines)"]


def test_a_measured_picture_keeps_its_words():
    stored = notebook("import torch\ntorch.ones(1)")
    stored.cells[1].outputs = [nbformat.v4.new_output("display_data", {"image/png": "aGk=\n", "text/plain": "Bars [two]\nof them"})]
    (cell,) = [cell for cell in for_browser(stored).cells if MEASURED_TAG in cell.metadata.get("tags", [])]
    assert "![Bars (two) of them](data:image/png;base64,aGk=)" in cell.source


@pytest.mark.parametrize("path", chapters(), ids=lambda path: path.stem)
def test_every_chapter_has_cells_that_run_and_all_its_panels(path):
    stored = nbformat.read(path, as_version=4)
    before = nbformat.writes(stored)
    made = for_browser(stored)
    nbformat.validate(made)
    assert nbformat.writes(stored) == before
    for source in code(made):
        ast.parse(source)
    panels = sum("Panel(" in cell.source for cell in stored.cells if cell.cell_type == "code")
    assert sum("Panel(" in source for source in code(made)) == panels >= 1
    assert any(MEASURED_TAG in cell.metadata.get("tags", []) for cell in made.cells)
