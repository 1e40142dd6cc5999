"""A lab's command line: exit codes, hints, --only, files; what a learner sees of all kinds of unfinished code."""

import json
import re
import sys
from pathlib import Path

import pytest

import actmem
from actmem_course.judge.exercise import hints
from actmem_course.judge.verdict import PASSED, Verdict
from tests.labs.faults import TORCHRUN
from tests.labs.in_process import judge_exit
from tests.labs.learners import judged_file, learner_file, start
from tests.tiers import at_night

#: Where our packages are, without spaces: the clone's folder can have any name.
OURS = "".join(str(Path(actmem.__file__).parents[1]).split())
LAB3, LAB4 = "lab3_sequence_parallel", "lab4_recompute"


def test_solution_passes_with_exit_code_0_and_a_file(tmp_path):
    path = tmp_path / "verdicts.json"
    done = start(learner_file(tmp_path, LAB3), "--solution", "--only", "3.1,3.2", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [(v["exercise"], v["status"]) for v in found["verdicts"]] == [("3.1", "passed"), ("3.2", "passed")]
    assert found["verdicts"][0].keys() == Verdict.__dataclass_fields__.keys() and found["ranks"] == 4
    assert "2 of 2 passed" in done.stdout and "(our solution, 4 ranks)" in done.stdout


def test_under_torchrun_real_ranks_judge_and_rank_0_speaks(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", TORCHRUN[0])  # a forked one has none of the words of torch's C++ side
    file = learner_file(tmp_path, LAB3, g=UNFINISHED["one rank alone raises"][0])
    done = start(file, "--only", "3.1,3.2", torchrun=True)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "real ranks on cpu" in said and "0 of 2 passed" in said
    assert (
        "3.1 g error" in said
        and "on rank 1: “raise ValueError('only here')” raises" in said
        and "not written yet: 3.2" in said
    )
    assert "traceback : nothing failed but the lab: its verdicts are above" in done.stderr
    assert "To enable traceback see" not in done.stderr and "TCPStore" not in done.stderr


def test_symptom_first_then_the_cause_then_the_repair(tmp_path):
    lab = learner_file(tmp_path, LAB3, g="return x")
    here = {"XDG_CACHE_HOME": str(tmp_path)}
    runs = [start(lab, "--only", "3.1", **here).stdout]
    nudge, hint = (start(lab, "--hint", "3.1", **here).stdout for _ in range(2))
    runs.append(start(lab, "--only", "3.1", **here).stdout)
    at_once = start(lab, "--only", "3.1", "--explain", XDG_CACHE_HOME=str(tmp_path / "another")).stdout
    symptom, why, do = "the result is this rank's own part", "why: it should be", "do: g's forward gathers"
    for said, expected in (
        (runs[0], [True, False, False]),
        (nudge, [False, False, False]),
        (hint, [False, True, False]),
        (runs[1], [True, True, True]),
        (at_once, [True, True, True]),
    ):
        assert [words in " ".join(said.split()) for words in (symptom, why, do)] == expected, said
    asks, why_at = (" ".join(hint.split()).index(words) for words in (hints()["3.1"][0], why))
    assert asks < why_at and not any(line.endswith(" ") for line in "".join(runs).splitlines())
    # What comes next is another mistake, so its symptom comes first again, though cause and repair are the same.
    learner_file(tmp_path, LAB3, g="return torch.cat([x] * dist.get_world_size(group))")
    assert "why:" not in start(lab, "--only", "3.1", **here).stdout


def test_one_more_hint_each_time(monkeypatch, capsys, tmp_path):
    own = hints()["4.1"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for count in (1, 2, 3):
        code, out, _ = judge_exit(LAB4, ["--hint", "4.1"], monkeypatch, capsys)
        text = " ".join(out.split())
        assert code == 0
        assert [" ".join(hint.split()) in text for hint in own[:4]] == [i < count for i in range(len(own[:4]))]


UNFINISHED = {
    "a name that is not there": ("return gather_all(x)", r"“return gather_all\(x\)” raises NameError: name 'gather_all' is not defined"),
    "group in place of op": ("dist.all_reduce(x.clone(), group)\n    return x", r"raises TypeError.*; group stands where op belongs: pass group=group"),
    "a helper": ("def halved(y):\n        return y.halved()\n\n    return halved(x)", r"“return y\.halved\(\)”, called in line \d+, raises AttributeError"),
    "a class of the learner's that is not written": ("class G(torch.autograd.Function):\n        pass\n    return G.apply(x)", r"forward"),
    "one rank alone raises": ("if dist.get_rank() == 1:\n        raise ValueError('only here')\n    return x", r"on rank 1: .*raises ValueError: only here"),
    "no backward": (
        "class G(torch.autograd.Function):\n        @staticmethod\n        def forward(ctx, x):\n            return torch.cat([x, x])\n"
        "    y = G.apply(x)\n    raise NotImplementedError('backward, later')",
        r"3\.1 g todo lab3_sequence_parallel.py:\d+",
    ),
    "leaving": ("raise SystemExit(3)", r"raises SystemExit: 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFINISHED)
def test_unfinished_code_gets_a_sentence(case, tmp_path):
    body, expected = UNFINISHED[case]
    first = judged_file(learner_file(tmp_path, LAB3, g=body), "3.1")
    assert first.status != PASSED
    said = f"{first.exercise} {first.function} {first.status} {first.where} {first.diagnosis}; {first.repair}"
    assert re.search(expected, said) and OURS not in "".join(said.split()), said


@pytest.mark.parametrize("unbuffered", ["", at_night("1")])
def test_what_a_learner_prints_is_seen_once_with_its_rank_and_a_flood_is_cut(unbuffered, tmp_path):
    body = "for number in range(2000):\n        print('line', number % 60, 'of', len(x.shape))\n    print('once')\n"
    body += "    [print(k) for k in range(5000)]\n    return x"
    done = start(learner_file(tmp_path, LAB3, g=body), "--only", "3.1", "--ranks", "2", PYTHONUNBUFFERED=unbuffered)
    before, _, after = done.stdout.partition("  3.1  g ")
    lines = [line.strip() for line in before.splitlines()[1:]]
    assert lines[:60] == [f"rank 0: line {number} of 3" for number in range(60)] and lines.count("rank 0: once") == 1
    cut = r"… [\d,]+ more lines \([\d,]+ characters\) are cut"
    assert len(lines) == len(set(lines)) == 101 and re.fullmatch(cut, lines[-1])
    assert "this rank's own part" in after
