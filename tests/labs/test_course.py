"""One course: what has passed over all labs, a class's files, what --json carries."""

import csv
import json
import os
import subprocess
import sys

import pytest

from actmem_course.judge import learner_progress
from actmem_course.judge.learner_progress import LearnerProgress
from actmem_course.judge.outline import ALL_LABS, load_lab
from actmem_course.judge.verdict import PASSED, WRONG, Verdict
from actmem_course.launch import LABS
from tests.labs.learners import learner_file, start
from tests.patience import SECONDS

RIGHT = "return 34 * hidden_size // (5 * num_attention_heads) + 1"


def test_progress_is_kept_and_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_progress, "MINE", tmp_path / "my")
    progress = LearnerProgress()
    assert progress.next()[1].number == "1.1"
    progress.note([Verdict("1.1", "layer_bytes", PASSED), Verdict("2.1", "f", PASSED), Verdict("2.2", "f_bar", WRONG)])
    again = LearnerProgress(tmp_path / "my" / "labs" / "lab2_tensor_parallel.py")
    assert again.passed == {"1.1", "2.1"} and again.next()[1].number == "1.2"
    number = sum(len(lab.exercises) for lab in ALL_LABS)
    assert f"2 of {number} exercises passed (1: 1/4, 2: 1/8" in again.summary()
    again.note([Verdict("2.1", "f", WRONG)])
    assert LearnerProgress().passed == {"1.1"}
    LearnerProgress().reset()
    assert not LearnerProgress().passed and not (tmp_path / "my" / ".progress.json").exists()


def test_every_exercise_names_a_section_of_its_chapter():
    for lab in ALL_LABS:
        for exercise in lab.exercises:
            source = LABS.parent / "notebooks" / "source" / f"{lab.chapter_of(exercise)}.py"
            chapter = source.read_text(encoding="utf-8")
            assert f"# ## {exercise.section}\n" in chapter, (lab.name, exercise.number, exercise.section)


def test_json_says_what_judged(tmp_path):
    path = tmp_path / "out.json"
    file = learner_file(tmp_path, "lab1_count_bytes")
    done = start(file, "--solution", "--json", str(path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert (found["lab"], found["ranks"]) == ("lab1_count_bytes", 1)
    assert {"python", "torch", "actmem"} <= found["versions"].keys()
    assert [v["status"] for v in found["verdicts"]] == ["passed"] * 4
    assert found["reward"]["measures"][0]["values"]["yours"] == found["reward"]["measures"][0]["values"]["measured"]


@pytest.mark.nightly
def test_a_class_is_judged_each_in_its_own_process(tmp_path):
    for name, body in {"ada": RIGHT, "bob": "return 1", "eve": "while True:\n        pass"}.items():
        (tmp_path / "class" / name).mkdir(parents=True)
        learner_file(tmp_path / "class" / name, "lab1_count_bytes", seconds=15, crossover_seq_length=body)
    (tmp_path / "class" / "notes.py").write_text("print('no lab')")
    table = tmp_path / "class.csv"
    done = subprocess.run(
        [sys.executable, "-m", "actmem_course.judge", str(tmp_path / "class"), "--csv", str(table), "--seconds", "100"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert len(rows) == 3 * len(load_lab("lab1_count_bytes").exercises)
    last = {row["file"].partition("/")[0]: row["status"] for row in rows if row["exercise"] == "1.4"}
    assert last == {"ada": "passed", "bob": "wrong", "eve": "wrong"} and "1 of 4" in done.stdout


#: Leaves its session and loses its parent; the number goes to a file.
LIVES_ON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open({file!r}, "w") as numbers:
            numbers.write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere nothing tells who started a process that lost its parent"
)
def test_no_file_ends_a_class_or_outlives_its_turn(tmp_path):
    number = tmp_path / "number"
    added = {
        "bob": LIVES_ON.format(file=str(number)),
        "eve": "raise ValueError('x' * 200_000)",
        "fay": "raise ValueError('x' * 2**22)",
    }
    for name, lines in added.items():
        (tmp_path / "class" / name).mkdir(parents=True)
        file = learner_file(tmp_path / "class" / name, "lab1_count_bytes", crossover_seq_length=RIGHT)
        head, call, tail = file.read_text().partition('\nif __name__ == "__main__":')
        file.write_text(f"{head}\n{lines}\n{call}{tail}")
    table = tmp_path / "class.csv"
    done = subprocess.run(
        [sys.executable, "-m", "actmem_course.judge", str(tmp_path / "class"), "--csv", str(table)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    last = [row for row in csv.DictReader(table.open(encoding="utf-8")) if row["exercise"] == "1.4"]
    assert {row["file"].partition("/")[0]: (row["status"], row["why"]) for row in last} == {
        "bob": ("passed", ""),
        "eve": ("not judged", ""),
        "fay": ("", "its verdicts are too long, or damaged"),
    }
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_a_class_that_is_none_is_one_line(tmp_path):
    for arguments, expected in (
        ([str(tmp_path)], "no Python file"),
        (["nowhere"], "must be a folder or the word progress"),
        ([str(tmp_path), "--csv", str(tmp_path / "none" / "a.csv")], "--csv: cannot write"),
        ([str(tmp_path), "--seconds", "nan"], "--seconds: must be positive, got nan"),
    ):
        done = subprocess.run([sys.executable, "-m", "actmem_course.judge", *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_hint_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('a hint loads torch')")
    file = learner_file(tmp_path, "lab2_tensor_parallel")
    done = start(file, "--hint", "2.1", PYTHONPATH=f"{tmp_path}:{LABS.parent / 'src'}", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and "• " in done.stdout, done.stderr
