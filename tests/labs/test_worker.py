"""The judge's process: what one exercise's code does to torch, to its group or to the judge is no other's business."""

import json
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actmem_course.judge.outline import load_lab
from actmem_course.judge.report import Report
from actmem_course.judge.verdict import BLOCKED, PASSED, SKIPPED, Verdict
from actmem_course.judge.virtual import VirtualRanks, file_and_line
from actmem_course.judge.worker import Worker
from actmem_course.strip_solutions import SOLUTIONS

LAB2, LAB3, LAB7 = "lab2_tensor_parallel", "lab3_sequence_parallel", "lab7_todays_layer"


@pytest.fixture
def judged(tmp_path):
    """What a worker that stays says of a file after the other; the file's text replaces pieces of our solution's."""
    heard: list[dict] = []
    worker = Worker(cast(Any, SimpleNamespace(send_bytes=lambda data: heard.append(json.loads(data)))))

    def judge(lab, only, *pieces):
        text = (SOLUTIONS / f"{lab}.py").read_text(encoding="utf-8")
        for old, new in zip(pieces[::2], pieces[1::2]):
            assert old in text
            text = text.replace(old, new)
        heard.clear()
        source = text.encode().decode("latin-1")
        file = str(tmp_path / f"{lab}.py")
        worker.judge({"lab": lab, "file": file, "source": source, "only": only, "size": 2, "changed_only": True})
        return [message["verdict"] for message in heard if "verdict" in message]

    return judge


def statuses(verdicts):
    return [verdict["status"] for verdict in verdicts]


POISON = {
    "grad mode": "torch.set_grad_enabled(False)\n    ",
    "its group": "dist.destroy_process_group()\n    ",
    "default dtype": "torch.set_default_dtype(torch.float16)\n    ",
}


@pytest.mark.parametrize("what", POISON)
def test_what_one_exercise_does_is_gone_with_the_next(what, judged):
    poisoned = "return _G.apply(x, group)", POISON[what] + "return x * 1"
    first, second = judged(LAB3, ["3.1", "3.2"], *poisoned)
    assert first["status"] != PASSED and second["status"] == PASSED, (first, second)
    assert statuses(judged(LAB3, ["3.1", "3.2"])) == [PASSED, PASSED]


@pytest.mark.parametrize(
    ("what", "said"), [("ValueError", "ValueError: now"), ("SystemExit", "it leaves before its end")]
)
def test_a_file_that_cant_be_loaded_is_said_once_with_its_line(what, said, judged):
    first, *others = judged(LAB7, ["7.2", "7.3", "7.4"], "# 7.3\n", f"# 7.3\nraise {what}('now')\n")
    assert f"the file can't be loaded: {said}" in first["diagnosis"]
    assert re.fullmatch(rf"{LAB7}\.py:\d+", first["where"])
    assert {v["status"] for v in (first, *others)} == {SKIPPED} and not any(v["diagnosis"] for v in others)


COLUMN = "return F.linear(f(x, group), weight, bias)"


def test_what_is_right_and_not_asked_for_is_not_to_blame(judged):
    _, _, last = judged(LAB2, ["2.1", "2.3", "2.6"], COLUMN, "return F.linear(x, weight, bias)")
    assert last["status"] == BLOCKED and last["diagnosis"].startswith("by 2.3 (column_parallel_linear); passes")


def test_a_function_that_is_gone_blocks_what_calls_it(judged):
    first, second = judged(LAB2, ["2.3", "2.6"], "def column_parallel_linear(", "def column_linear(")
    assert "no longer has a function column_parallel_linear" in first["diagnosis"]
    assert second["status"] == BLOCKED and second["diagnosis"].startswith("by 2.3 (column_parallel_linear)")


def test_an_instruction_without_a_line_has_the_one_before():
    code = compile("a = 1\nwhile a:\n    a = 2\n", "/x/lab.py", "exec")
    last = [start for start, _, line in code.co_lines() if line][-1]
    frame = SimpleNamespace(f_lineno=None, f_lasti=last + 1, f_code=code)
    assert re.fullmatch(r"lab\.py:[23]", file_and_line(cast(Any, frame)))


def test_nothing_judged_is_not_all_passed():
    report = Report(load_lab(LAB2), "lab.py", asked=2)
    assert not report.all_passed
    report.verdicts = [Verdict("2.1", "f", PASSED)]
    assert not report.all_passed


def test_virtual_ranks_take_turns():
    import torch.distributed as dist

    def mean(rank):
        x = torch.full((2,), float(rank.number))
        dist.all_reduce(x)
        if rank.number:
            dist.send(x + rank.number, 0)
            return None
        for other in range(rank.size - 1, 0, -1):
            got = torch.empty(2)
            dist.recv(got, other)
            assert got[0] == 6 + other
        return x[0].item()

    ranks = VirtualRanks(4)
    assert ranks.run(mean) == [6.0, None, None, None]
    assert ranks.run(lambda rank: torch.rand(1).item()) == [ranks.run(lambda rank: torch.rand(1).item())[0]] * 4
    assert not dist.is_initialized()
