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
    assert second["status"] == "todo" and second["diagnosis"] == ""  # by another process
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


def test_what_ends_or_stops_the_process_is_told_apart_and_the_others_are_judged(tmp_path):
    bodies = {
        "layer_bytes": "import ctypes\n    ctypes.string_at(0)",
        "rank_bytes": "while True:\n        pass",
        "gated_mlp_bytes": "import time\n    time.sleep(1.5)\n    return 3",
        "crossover_seq_length": "breakpoint()",
    }
    path = tmp_path / "verdicts.json"
    file = learner_file(tmp_path, "lab1_count_bytes", seconds=4, **bodies)
    done = start(file, "--json", str(path))
    found = [(v["status"], v["diagnosis"]) for v in json.loads(path.read_text())["verdicts"]]
    place = r"lab1_count_bytes\.py:\d+"
    for (status, said), (expected, words) in zip(
        found,
        [
            ("wrong", rf"it died: ended by SIGSEGV, at {place}, in layer_bytes"),
            ("wrong", rf"no end after 4 s: rank 0 is at {place}, in rank_bytes"),
            ("wrong", rf"too slow, not done after 4 s: rank 0 is at {place}, in gated_mlp_bytes"),
            ("error", r"“breakpoint\(\)” raises RuntimeError: no debugger can be used here"),
        ],
        strict=True,
    ):
        assert status == expected and re.search(words, said), said
    assert done.returncode == 1


def test_what_uses_a_function_that_never_ends_is_blocked_by_it(tmp_path):
    path = tmp_path / "verdicts.json"
    file = learner_file(
        tmp_path,
        NAME,
        seconds=4,
        g="while True:\n        pass",
        gathering_linear="return F.linear(g(x, group), weight, bias)",
    )
    start(file, "--only", "3.1,3.3", "--json", str(path), "--ranks", "2")
    first, second = json.loads(path.read_text())["verdicts"]
    assert (
        "no end after 4 s" in first["diagnosis"] and second["status"] == "blocked" and "3.1 (g)" in second["diagnosis"]
    )
