"""The GPU script: a step that fails costs only itself.  At night it runs on stand-in GPUs (standin/)."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from gpu_steps.session import NO_TIME, Session
from gpu_steps.strangers import Predictions

from actmem_course import launch
from tests.patience import SECONDS


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


def test_a_prediction_that_is_late_or_fails_leaves_what_was_measured():
    predictions = Predictions("cpu", 80)
    for kind, program in (("plan", "import time; time.sleep(600)"), ("record_fake", "import sys; sys.exit('no such')")):
        command = [sys.executable, "-c", program]
        predictions._running[kind, "a step"] = subprocess.Popen(command, stderr=subprocess.PIPE)
    run = Session(None, 60, lambda line: None)
    run.step("strangers", "a step", lambda: {"peak_bytes": 7})
    [row] = run.results["strangers"]
    for kind, timeout in zip(predictions.about("a step"), (0.1, SECONDS), strict=True):
        run.attempt(kind, partial(predictions.add_to, row, kind, timeout))
    predictions.stop()
    assert row == {"name": "a step", "peak_bytes": 7}
    assert run.results["skipped"] == [
        {"step": "plan", "reason": "TimeoutError: not ready after 0 s"},
        {"step": "record_fake", "reason": "RuntimeError: no such"},
    ]
    assert all(process.returncode for process in predictions._running.values())


#: A borrowed GPU often has torch and rich, and nothing that draws.
PREDICTS = """
import sys, time
sys.modules.update(dict.fromkeys(("plotly", "IPython", "ipywidgets", "anywidget")))
sys.path.insert(0, sys.argv.pop(1))
import measure_gpu
def measure_others(session, args, predictions, steps):
    predictions.start_plan(*steps[0])
    print(*(process.pid for process in predictions._running.values()), flush=True)
    time.sleep(600)
measure_gpu.measure_paper, measure_gpu.measure_others = print, measure_others
measure_gpu.main()
"""


def test_sigterm_ends_what_predicts_and_leaves_no_file(tmp_path):
    command = [sys.executable, "-c", PREDICTS, str(launch.LABS), "--device", "cpu", "--quick"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) as run:
        run.stdout.readline()  # of what measures the paper's layers
        predicts = int(run.stdout.readline())
        run.terminate()
    assert run.returncode == 128 + signal.SIGTERM and list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(predicts, 0)
