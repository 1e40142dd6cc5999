"""The main job as a user starts it: torchrun or --emulate, JSON, and bad input in one line.  Chapter 5 has --ranks."""

import json
import os
import subprocess
from argparse import Namespace

import pytest
import torch
from measure_table2 import needed_bytes

from actmem.config import ModelShape
from actmem_course import launch
from actmem_course.lab_tools.machine import ranks_here
from tests.labs.faults import TORCHRUN
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_table2.py"


def test_a_rank_that_torchrun_did_not_start_is_alone_on_its_host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_here(Namespace(emulate=None, device="cpu")) == 1


def test_emulated_with_sizes_of_ones_own(tmp_path):
    path = tmp_path / "results.json"
    sizes = ["--seq-length", 64, "--micro-batch-size", 3, "--hidden-size", 48, "--num-attention-heads", 8]
    shown = shown_in_80_columns(SCRIPT, "--emulate", 8, *sizes, "--elementwise", "--json", path)
    assert "7 of 7 measurements agree" in shown and "s=64 b=3 h=48 a=8" in shown
    assert all(f"\n {term} " in shown for term in ("layer-norm 1 statistics", "causal mask", "random-number state"))
    sbh, (*_, full, own) = 64 * 3 * 48, json.loads(path.read_text())
    assert full["predicted_bytes"] == 2 * sbh
    assert own["formula"] == "20/t" and own["predicted_bytes"] == 20 * sbh // 8


def test_room_counts_the_scores_that_are_needed_for_a_moment():
    scores = 8 * 4096**2
    saved = 34 * 4096 * 64 + 5 * scores + 2 * 12 * 64**2
    assert needed_bytes(ModelShape(4096, 1, 64, 8, vocab_size=1), torch.bfloat16) == saved + 4 * scores


@pytest.mark.nightly
def test_bad_input_that_only_rank_0_finds_is_said_once():
    command = [*TORCHRUN, str(launch.LABS / SCRIPT), "--json", "/proc/actmem/x.json"]
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
