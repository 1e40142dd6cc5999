"""The main job as a user starts it: torchrun or --emulate, JSON, and bad input in one line.  Chapter 5 has --ranks."""

import json
import os
import subprocess
from argparse import Namespace

import pytest

from actmem.formulas.activations import TABLE2
from actmem_course import launch
from actmem_course.lab_tools.machine import ranks_here
from tests.labs.faults import TORCHRUN
from tests.labs.in_process import lab_results, shown_in_80_columns

SCRIPT = "measure_table2.py"


def test_on_two_ranks(pools):
    results = lab_results(pools[2], SCRIPT)
    assert [r["configuration"] for r in results] == [c.name for c in TABLE2] * 2
    assert {r["rank"] for r in results} == {0, 1}
    for result in results:
        assert result["measured_bytes"] == result["predicted_bytes"] + result["extra_bytes"]
        assert result["exact"] and result["difference_bytes"] == 0
        assert result["tensor_parallel_size"] == (1 if result["configuration"] == "none" else 2)


def test_a_rank_that_torchrun_did_not_start_is_alone_on_its_host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_here(Namespace(emulate=None, device="cpu")) == 1


def test_emulated_with_sizes_of_ones_own(tmp_path):
    path = tmp_path / "results.json"
    sizes = ["--seq-length", 64, "--micro-batch-size", 3, "--hidden-size", 48, "--num-attention-heads", 8]
    shown = shown_in_80_columns(SCRIPT, "--emulate", 8, *sizes, "--json", path)
    assert "6 of 6 measurements agree" in shown and "s=64 b=3 h=48 a=8" in shown
    assert [r["predicted_bytes"] for r in json.loads(path.read_text())][-1] == 2 * 64 * 3 * 48


def test_bad_input_under_torchrun_is_said_once_by_rank_0():
    command = [*TORCHRUN, str(launch.LABS / SCRIPT), "--json", "/proc/actmem/x.json"]  # only rank 0 can find it
    done = subprocess.run(command, capture_output=True, text=True)
    own = [line for line in done.stderr.splitlines() if line.startswith("measure_table2.py: ")]
    assert len(own) == 1 and "--json: cannot write" in own[0]
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr and "(local_rank: 0)" in done.stderr


def test_bad_input_ends_a_real_process_with_2_and_loses_nothing(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("kept")
    done = launch.run(SCRIPT, "--emulate", 3, "--json", path)
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1, done.stderr
    assert path.read_text() == "kept"
    with pytest.raises(launch.LabError, match="must be divisible by tensor_parallel_size = 3"):
        launch.results(SCRIPT, "--emulate", 3)
    assert os.listdir(tmp_path) == ["kept.json"]
