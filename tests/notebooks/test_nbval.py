"""nbval, as it is set up in notebooks/conftest.py, fails on a changed number and on nothing less."""

import os
import re
import subprocess
import sys

import nbformat
from nbformat import v4

from notebooks.source.build import NOTEBOOKS

CODE = "from IPython.display import HTML, display\ndisplay(HTML('<b>now</b>'))\nprint(7)"


def stored(html="<b>now</b>", text="7\n"):
    """A cell, and what it is said to have printed."""
    shown = [
        v4.new_output("display_data", {"text/html": html, "text/plain": "<IPython.core.display.HTML object>"}),
        v4.new_output("stream", name="stdout", text=text),
    ]
    return v4.new_code_cell(CODE, execution_count=1, outputs=shown)


def test_a_changed_number_fails_and_nothing_less(tmp_path):
    (tmp_path / "conftest.py").write_text((NOTEBOOKS / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    cells = [stored(), stored(text="8\n"), stored(html="<b>then</b>")]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "notebook.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "-rfp", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    python_path = os.pathsep.join([str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True)
    ends = sorted(re.findall(r"^(FAILED|PASSED) notebook\.ipynb::Cell (\d)", done.stdout, re.MULTILINE))
    assert ends == [("FAILED", "1"), ("PASSED", "0"), ("PASSED", "2")], done.stdout + done.stderr
