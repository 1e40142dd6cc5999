"""nbval, as it is set up in notebooks/conftest.py, fails on a changed number and on nothing less."""

import os
import subprocess
import sys

import nbformat
import pytest
from nbformat import v4

from notebooks.source.build import NOTEBOOKS

CODE = "from IPython.display import HTML, display\ndisplay(HTML('<b>now</b>'))\nprint(7)"


def stored(html="<b>now</b>", text="7\n", count=1):
    """A notebook with one cell, and what it is said to have printed."""
    shown = [
        v4.new_output("display_data", {"text/html": html, "text/plain": "<IPython.core.display.HTML object>"}),
        v4.new_output("stream", name="stdout", text=text),
    ]
    return v4.new_notebook(cells=[v4.new_code_cell(CODE, execution_count=count, outputs=shown)])


@pytest.fixture
def check(tmp_path):
    """Run nbval, strictly, with the notebooks' own conftest, and say whether it passed."""

    def run(notebook):
        (tmp_path / "conftest.py").write_text((NOTEBOOKS / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
        (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        nbformat.write(notebook, tmp_path / "a.ipynb")
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "a.ipynb"]
        python_path = os.pathsep.join([str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode == 0

    return run


def test_the_same_passes(check):
    assert check(stored())


def test_another_number_fails(check):
    assert not check(stored(text="8\n"))


def test_other_html_passes(check):
    assert check(stored(html="<b>then</b>"))
