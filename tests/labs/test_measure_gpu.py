"""The GPU script on a CPU, through the same code; a step that fails costs only itself."""

import json
import subprocess
import sys

import pytest
from gpu_steps.session import NO_TIME, Session

from actmem_course import launch

SCRIPT = "measure_gpu.py"


@pytest.mark.nightly
def test_quick_on_a_cpu(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    path = tmp_path / "results.json"
    done = launch.run(SCRIPT, "--device", "cpu", "--quick", "--output", path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    assert results["skipped"] == [] and {"date", "machine", "settings", "seconds"} <= results.keys()
    assert len(results["table2"]) == 12 and all(r["predicted_bytes"] == r["ledger_bytes"] for r in results["table2"])
    steps = ("wall", "rates", "table4", "modes", "peers", "kernels", "strangers", "allocator")
    assert all(results[step] for step in steps)


def test_a_step_that_fails_is_noted_and_the_next_one_runs(tmp_path):
    path = tmp_path / "results.json"
    run = Session(path, 60, lambda line: None)
    run.step("group", "one", lambda: {"n": 1 / 0})
    run.step("group", "two", lambda: {"n": 2})
    run.seconds = 0  # from here on there is no time
    run.step("group", "three", lambda: {"n": 3})
    results = json.loads(path.read_text())
    assert results["group"] == [{"name": "two", "n": 2}]
    assert results["skipped"] == [
        {"step": "group: one", "reason": "ZeroDivisionError: division by zero"},
        {"step": "group: three", "reason": NO_TIME},
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("plotly", "IPython", "ipywidgets", "anywidget")))
sys.path.insert(0, sys.argv[1])
import measure_gpu
"""


def test_nothing_of_it_needs_a_notebook_or_plotly():
    """A borrowed GPU often has torch and rich and nothing else."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(launch.LABS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
