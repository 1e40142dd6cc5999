"""Loops, deadlocks and dead ranks end every rank, and the verdict says who waits where."""

import json
import re

import pytest

from tests.labs.learners import learner_file, start
from tests.tiers import at_night

NAME = "lab3_sequence_parallel"
RANK_1 = "if dist.get_rank() == 1:\n        "
#: What is given to rank 1 (rank 0 gathers), and what the verdict says.
STUCK = {
    "an endless loop": (RANK_1 + "while True:\n            pass", r"no end after 12 s: rank 1 is at lab3_sequence_parallel.py:\d+, in g"),
    "a message that nobody sends": (
        RANK_1 + "dist.recv(x, 0)",
        r"deadlock: rank 0 is waiting in all_gather \(.*\); rank 1 is waiting in receive \(lab3_sequence_parallel.py:\d+\)",
    ),
    "a rank that dies": (RANK_1 + "import ctypes\n        ctypes.CDLL(None)._exit(3)", r"it died: exit code 3"),
    "a rank that is killed": (RANK_1 + "import os, signal\n        os.kill(os.getpid(), signal.SIGKILL)", r"it died: ended by SIGKILL"),
}  # fmt: skip
GATHER = "\n    y = x.new_empty(2 * x.shape[0], *x.shape[1:])\n    dist.all_gather_into_tensor(y, x.contiguous(), group=group)\n    return y"


@pytest.mark.parametrize(
    ("case", "torchrun"),
    [
        *((case, False) for case in STUCK if case != "a rank that is killed"),
        at_night(("a rank that is killed", False)),
        at_night(("an endless loop", True)),
        ("a rank that dies", True),
    ],
)
def test_every_rank_ends_and_the_verdict_says_where(case, torchrun, tmp_path):
    body, expected = STUCK[case]
    path = tmp_path / "verdicts.json"
    file = learner_file(tmp_path, NAME, seconds=12, g=body + GATHER)
    done = start(file, "--only", "3.1,3.2", "--json", str(path), *["--ranks", "2"] * (not torchrun), torchrun=torchrun)
    assert done.returncode == 1
    first, second = json.loads(path.read_text())["verdicts"]
    assert (first["exercise"], first["status"]) == ("3.1", "wrong") and re.search(expected, first["diagnosis"]), first
    if "deadlock" in expected:
        assert second["status"] == "todo" and second["diagnosis"] == ""
    else:
        assert (second["status"], second["diagnosis"]) == ("not judged", "3.1 ended the ranks")
    assert "0 of 2 passed" in done.stdout and "Traceback" not in done.stdout


def test_mismatched_collectives_are_named_and_judging_goes_on(tmp_path):
    body = RANK_1 + "dist.all_reduce(x.clone(), group=group)" + GATHER
    file = learner_file(tmp_path, NAME, g=body, g_bar="return x[: len(x) // 2]")
    done = start(file, "--only", "3.1,3.2", "--ranks", "2")
    text = " ".join(done.stdout.split())
    assert done.returncode == 1
    where = r"rank 0 is waiting in all_gather \(\S+:\d+\); rank 1 is waiting in all_reduce \(\S+:\d+\)"
    assert re.search(f"deadlock: {where}", text), text
    assert "3.2 g_bar wrong" in text and "ended the ranks" not in text
