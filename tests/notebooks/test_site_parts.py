"""What the site is made of: statements that a browser can run, labs as exercises, packages fetched once."""

import ast

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from actmem_course.strip_solutions import lab_names, lab_source
from notebooks.site import book, cache
from notebooks.site.live import SOURCE, modules
from notebooks.site.needs import Reader, needs_machine
from notebooks.site.slices import figures


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("torch", True),
        ("subprocess", True),
        ("math", False),
        ("actmem", False),
        ("actmem.record", True),  # loaded when it is asked for
        ("actmem_course.figures.Panel", False),
        ("actmem.ledger.recorder", True),
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
        (["from actmem.ledger.recorder import record", "f = lambda: record", "f()"], [[1], [1], [1]]),
        (["import actmem as am", "am.layer_rows", "f = lambda: am.record", "f()"], [[0], [0], [1], [1]]),
        (["from actmem.ledger.recorder import record as r\nfrom actmem.rows import total", "r", "total"], [[1, 0], [1], [0]]),
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


@pytest.mark.parametrize(("module", "moves"), [("ch07_time", True), ("gpu_results", False)])
def test_a_figure_of_what_a_gpu_measured_stands_still_in_a_page(module, moves):
    cell = new_code_cell(f"from actmem_course.figures.{module} import draw\nLiveFigure(draw())")
    assert (cell.id in figures(new_notebook(cells=[cell]))) == moves


def test_labs_that_someone_solved_in_place_are_published_as_exercises(tmp_path, monkeypatch):
    labs = tmp_path / "labs"
    labs.mkdir()
    for name in lab_names():
        (labs / f"{name}.py").write_text("SOLVED = True\n")
    (labs / "measure_mine.py").write_text('"""python labs/measure_mine.py\n\nMine: all of it.\n"""\n')
    monkeypatch.setattr(book, "ROOT", tmp_path)
    found = book.labs()
    assert list(found) == [*(f"{name}.py" for name in lab_names()), "measure_mine.py"]
    assert not any("SOLVED" in source for source in found.values())
    assert all(found[f"{name}.py"] == lab_source(name) for name in lab_names())


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache, and a folder whose programs stand in for the installed ones."""
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return tools


def npm(tools, script):
    (tools / "npm").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tools / "npm").chmod(0o755)


GOOD = "echo called >> ../calls; mkdir package; echo 1 > package/index.js; tar czf some-1.0.tgz package; rm -r package"


def test_an_npm_package_is_fetched_once(empty):
    npm(empty, GOOD)
    first = cache.npm_package("some@1.0")
    assert (first / "index.js").read_text(encoding="utf-8") == "1\n"
    assert cache.npm_package("some@1.0") == first
    assert (first.parent / "calls").read_text(encoding="utf-8") == "called\n"


def test_no_npm_is_one_line(empty, monkeypatch):
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(cache.SiteError, match="^npm is missing, and some@1.0 comes from the npm registry: [^\n]*$"):
        cache.npm_package("some@1.0")


def test_an_npm_that_fails_is_one_line_and_leaves_nothing(empty):
    npm(empty, "echo 'npm error network ENOTFOUND' >&2; exit 1")
    with pytest.raises(
        cache.SiteError, match=r"^npm could not get some@1.0 \(no network\?\): npm error network ENOTFOUND$"
    ):
        cache.npm_package("some@1.0")
    npm(empty, GOOD)
    assert cache.npm_package("some@1.0").exists()
