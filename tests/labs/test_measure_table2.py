"""The main job as a user starts it: torchrun or --emulate, JSON, and bad input in one line."""

import json
import os
import sys

import pytest
import torch

from actmem.formulas.activations import TABLE2
from actmem_course import launch
from tests.labs.in_process import lab_exit, lab_results

SCRIPT = "measure_table2.py"
PYTHON = sys.executable  # before conftest.py puts another in its place
FIELDS = {"configuration", "tensor_parallel_size", "rank", "predicted_bytes", "extra_bytes", "measured_bytes"}


@pytest.mark.parametrize(("processes", "dtype"), [(1, "bfloat16"), (2, "float32"), (4, "bfloat16")])
def test_on_ranks(processes, dtype, pools):
    check_results(lab_results(pools[processes], SCRIPT, "--dtype", dtype), processes)


def test_under_torchrun():
    check_results(launch.results(SCRIPT, processes=2), 2)


def check_results(results, processes):
    assert len(results) == len(TABLE2) * processes
    assert [r["configuration"] for r in results] == [c.name for c in TABLE2] * processes
    assert {r["rank"] for r in results} == set(range(processes))
    for result in results:
        assert result.keys() >= FIELDS
        assert result["measured_bytes"] == result["predicted_bytes"] + result["extra_bytes"]
        assert result["exact"] and result["difference_bytes"] == 0
        assert result["tensor_parallel_size"] == (1 if result["configuration"] == "none" else processes)


def test_emulated_with_sizes_of_ones_own(tmp_path):
    path = tmp_path / "results.json"
    sizes = ["--seq-length", 64, "--micro-batch-size", 3, "--hidden-size", 48, "--num-attention-heads", 8]
    done = launch.run(SCRIPT, "--emulate", 8, *sizes, "--json", path)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 measurements agree" in done.stdout and "s=64 b=3 h=48 a=8" in done.stdout
    assert [r["predicted_bytes"] for r in json.loads(path.read_text())][-1] == 2 * 64 * 3 * 48


def test_eighty_columns_cut_no_number_off():
    done = launch.run(SCRIPT, "--emulate", 8, "--model", "1T", "--dtype", "float32")
    assert done.returncode == 0 and "…" not in done.stdout
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines())


BAD = {
    "heads not divisible by t": (
        ["--emulate", 3],
        "--num-attention-heads: 8 must be divisible by tensor_parallel_size = 3",
    ),
    "sequence not divisible by t": (["--emulate", 8, "--seq-length", 12], "--seq-length: 12 must be divisible by"),
    "h not divisible by a": (
        ["--emulate", 2, "--hidden-size", 100],
        "--hidden-size: 100 must be divisible by num_attention_heads = 8",
    ),
    "zero": (["--emulate", 2, "--micro-batch-size", 0], "--micro-batch-size: must be at least 1, got 0"),
    "negative": (["--emulate", 2, "--seq-length", -8], "--seq-length: must be at least 1, got -8"),
    "absurd": (["--emulate", 2, "--hidden-size", 8 * 10**12], "--hidden-size: must be at most"),
    "absurd together": (["--emulate", 1, "--seq-length", 2**30, "--num-attention-heads", 256], "one tensor would have"),
    "no number": (["--emulate", 2, "--hidden-size", "big"], "--hidden-size: invalid int value: 'big'"),
    "no model": (["--emulate", 2, "--model", "9B"], "--model: invalid choice: '9B'"),
    "no ranks": (["--emulate", 0], "--emulate: must be at least 1, got 0"),
    "unwritable": (["--emulate", 2, "--json", "/proc/actmem/x.json"], "--json: cannot write /proc/actmem/x.json"),
    "not started": ([], "run torchrun --nproc-per-node 2 labs/measure_table2.py"),
    "no GPU": (["--emulate", 2, "--device", "cuda"], "--device: torch finds no CUDA GPU here"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, monkeypatch, capsys):
    arguments, expected = BAD[case]
    if case == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", None)  # a CUDA build can do without one
    code, out, (line,) = lab_exit(SCRIPT, arguments, monkeypatch, capsys)
    assert code == 2 and out == ""
    assert line.startswith("measure_table2.py: ") and expected in line


@pytest.mark.bad_input
def test_bad_input_ends_a_real_process_with_2(monkeypatch):
    # The forked Python has loaded triton, and that of torch 2.15 ends with 31 lines on what it leaked.
    monkeypatch.setattr(sys, "executable", PYTHON)
    done = launch.run(SCRIPT, "--emulate", 3)
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1, done.stderr


TWO = [{"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2} for rank in (0, 1)]
OF_RANKS = [
    (["--num-attention-heads", 5], "--hidden-size: 256 must be divisible by num_attention_heads = 5"),
    (["--device", "cpu", "--model", "1T", "--seq-length", 65536], "use --emulate"),
    (["--emulate", 2], "--emulate: needs a single process"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("arguments", "expected"), OF_RANKS)
def test_bad_input_of_ranks_is_said_once_by_rank_0(arguments, expected, monkeypatch, capsys):
    code, out, (line,) = lab_exit(SCRIPT, arguments, monkeypatch, capsys, **TWO[0])
    assert (code, out) == (2, "") and line.startswith("measure_table2.py: ") and expected in line
    assert lab_exit(SCRIPT, arguments, monkeypatch, capsys, **TWO[1]) == (0, "", [])


@pytest.mark.bad_input
def test_bad_input_under_torchrun_is_said_once_by_rank_0():
    done = launch.run(SCRIPT, "--json", "/proc/actmem/x.json", processes=2)  # only rank 0 can find it
    own = [line for line in done.stderr.splitlines() if line.startswith("measure_table2.py: ")]
    assert len(own) == 1 and "--json: cannot write" in own[0]
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr and "(local_rank: 0)" in done.stderr


def test_a_bad_path_loses_nothing(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("kept")
    launch.run(SCRIPT, "--emulate", 3, "--json", path)
    assert path.read_text() == "kept"
    with pytest.raises(launch.LabError, match="must be divisible by tensor_parallel_size = 3"):
        launch.results(SCRIPT, "--emulate", 3)
    assert os.listdir(tmp_path) == ["kept.json"]
