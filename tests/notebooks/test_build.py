"""Each notebook is what its source makes.

Of all notebooks the cells are compared here; what they print is compared by nbval, which runs
them all, and the figures that their pictures show by test_site.py.
"""

import os
import subprocess
import sysconfig
import venv

import nbformat
import pytest

from notebooks.source import build as builder
from notebooks.source.build import (
    NOTEBOOKS,
    SOURCES,
    execute,
    read,
    sources,
    target,
    tidy,
    without_pictures,
    write,
)


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)
def test_its_cells_are_the_sources(source):
    fresh, stored = read(source), nbformat.read(target(source), as_version=4)
    for cell in stored.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    assert fresh.cells == stored.cells, f"run: python -m notebooks.source.build {source.stem[:2]}"


SOURCE = """# %% [markdown]
# # Title

# %%
print(1 + 1)

# %%
print(1 + 1)

# %%
from actmem.config import ModelShape
from actmem_course.figures import LiveFigure, Varies
from actmem_course.figures.layer_picture import layer_picture

LiveFigure(layer_picture(ModelShape(64, 1, 64, 4)))

# %%
Varies({"Python": "3.x"})
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "42_example.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


class Painter:
    """Draws nothing, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def paint(self, specs):
        self.asked.append(specs)
        return f"picture {len(self.asked)}"


def built(source, painter, old):
    notebook = execute(read(source))
    tidy(notebook, painter, old)
    return notebook


def test_a_build_keeps_what_is_the_same_every_time_and_paints_only_what_changed(source, tmp_path):
    painter = Painter()
    first = built(source, painter, {})
    _, two, same, figure, varies = first.cells
    assert two.outputs[0].text == "2\n" and two.id != same.id
    (shown,) = figure.outputs
    assert set(shown.data) == {"text/plain", "image/png"} and shown.data["image/png"] == "picture 1"
    assert list(varies.outputs[0].data) == ["text/plain"] and varies.outputs[0].metadata == {}
    assert len(painter.asked[0]) == 1

    write(first, tmp_path / "42_example.ipynb")
    again = built(source, painter, builder.stored_pictures(tmp_path / "42_example.ipynb"))
    assert len(painter.asked) == 1
    write(again, tmp_path / "again.ipynb")
    assert (tmp_path / "again.ipynb").read_bytes() == (tmp_path / "42_example.ipynb").read_bytes()

    source.write_text(SOURCE.replace("ModelShape(64", "ModelShape(65"), encoding="utf-8")
    changed = built(source, None, builder.stored_pictures(tmp_path / "42_example.ipynb"))
    assert "image/png" not in changed.cells[3].outputs[0].data, "the picture of another figure is worse than none"
    assert without_pictures(changed) != without_pictures(first)


@pytest.mark.nightly
def test_the_notebook_for_free_gpus_installs_the_course_from_the_repository(tmp_path):
    venv.create(tmp_path / "venv")
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    packages = sysconfig.get_paths()["purelib"]
    (site / "packages.pth").write_text(f"{packages}\n")  # torch and pip, and not what the .pth files there add
    first = next(cell.source for cell in read(SOURCES / "free_gpus.py").cells if cell.cell_type == "code")
    program = first.replace('REPOSITORY = ""', f"REPOSITORY = {str(NOTEBOOKS.parent)!r}")
    program += "\nimport actmem_course.launch as launch; print(launch.LABS); print(launch.run('measure_runs.py', '--help').returncode)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", program]
    environment = {**clean, "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [str(tmp_path / "actmem" / "labs"), "0"], done.stderr
