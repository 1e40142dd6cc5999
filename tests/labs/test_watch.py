"""--watch: ranks that stay judge at each save; one that dies or hangs is replaced."""

import os
import queue
import re
import subprocess
import sys
import threading
import time

import pytest

from actmem_course.judge.parent import JudgeProcess, Outdated
from tests.labs.learners import learner_file

LAB = "lab3_sequence_parallel"
LIST_GATHER = """parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)"""


class Watched:
    """A lab that runs with --watch; every verdict that it prints.  said: of the latest judgement, when, by exercise."""

    def __init__(self, path, *arguments):
        self.path, self._lines, self.said = path, queue.Queue(), {}
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(path.parent)}
        self._process = subprocess.Popen(
            [sys.executable, str(path), "--watch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put((line, time.monotonic()))

    def verdicts(self):
        """What the next judgement says, and its time."""
        text, self.said = "", {}
        while True:
            line, when = self._lines.get(timeout=120)
            text += line
            if verdict := re.match(r"  (\d+\.\d+)  ", line):
                self.said[verdict[1]] = when
            if line.startswith("judged in"):
                return " ".join(text.split()), float(re.search(r"judged in ([\d.]+) s", line)[1])

    def save(self, body, **others):
        """Save another body of g, and of others; what is said then."""
        beside = self.path.parent / "beside"
        beside.mkdir(exist_ok=True)
        learner_file(beside, LAB, seconds=9, g=body, **others).replace(self.path)
        return self.verdicts()

    def end(self):
        self._process.terminate()
        return self._process.wait(30)


@pytest.fixture
def watched(tmp_path):
    file = learner_file(tmp_path, LAB, seconds=9, g="return x")
    run = Watched(file, "--only", "3.1,3.2", "--ranks", "2")
    yield run
    run.end()


def test_a_save_is_judged_by_ranks_that_stay(watched):
    assert "3.1 g wrong" in watched.verdicts()[0]
    text, _ = watched.save(LIST_GATHER)
    assert "it has no graph" in text and "3.2 g_bar not written yet" in text
    assert "can't be loaded: SyntaxError" in watched.save("return (x")[0]
    assert "this rank's own part" in watched.save("return x + 0")[0]


def test_a_save_that_is_superseded_is_one_line_and_a_summary_comes_once(watched, tmp_path):
    watched.verdicts()
    beside = tmp_path / "beside"
    beside.mkdir()
    learner_file(beside, LAB, seconds=9, g="import time\n    time.sleep(2)\n    return x").replace(watched.path)
    time.sleep(1)
    text, _ = watched.save(LIST_GATHER)
    before, _, after = text.partition("saved again: judging the new one")
    assert after and "next: 1.1" not in text
    # Before it stands what follows the first verdicts.
    assert before.count("all labs:") == 1 and "passed" not in before.partition("ranks on cpu")[2]


def test_a_save_does_not_wait_for_a_process_that_starts(tmp_path):
    process = JudgeProcess()
    try:
        with pytest.raises(Outdated):
            list(process.ask(str(tmp_path), lambda: True, do="judge"))
        assert not process.ready and not process.busy
    finally:
        process.end()


def test_editors_that_empty_the_file_and_write_it_in_parts(watched, tmp_path):
    """All ranks judge one text, so no rank waits for one that judges another."""
    watched.verdicts()
    beside = tmp_path / "beside"
    beside.mkdir()
    for number in range(20):
        whole = learner_file(beside, LAB, seconds=9, g=f"return x + {number}").read_bytes()
        middle = whole.index(b"def g_bar")
        with open(watched.path, "wb", buffering=0) as file:  # opening it empties it
            for part in (whole[:middle], whole[middle:]):
                time.sleep(0.03 * (number % 4))
                file.write(part)
        time.sleep(0.05 * (number % 3))
    said = [watched.save(LIST_GATHER)[0]]
    while "it has no graph" not in said[-1]:
        said.append(watched.verdicts()[0])
    for text in said:
        assert not re.search("RanksLost|no end after|died|waiting", text), text


@pytest.mark.nightly
def test_ranks_that_die_or_hang_are_replaced(watched):
    watched.verdicts()
    text, _ = watched.save("import ctypes\n    ctypes.CDLL(None)._exit(0)")
    assert "3.1 g wrong it died: it ended the process by itself, with exit code 0 and without a verdict" in text
    assert "this rank's own part" in watched.save("return x + 0")[0]
    text, _ = watched.save("while True:\n        pass")
    assert re.search(r"no end after 9 s: rank 0 is at lab3_sequence_parallel.py:\d+, in g", text), text
    assert "this rank's own part" in watched.save("return x * 1")[0]


def test_what_has_not_changed_keeps_its_verdict_and_is_not_run_again(watched, tmp_path):
    log = tmp_path / "runs of g_bar"
    g_bar = f'with open({str(log)!r}, "a") as log:\n        log.write("run ")\n    return x'
    watched.verdicts()
    assert "3.2 g_bar wrong" in watched.save("return x + 0", g_bar=g_bar)[0]
    runs = log.read_text()
    for k in range(1, 4):
        text, _ = watched.save(f"return x + {k}", g_bar=g_bar)
        assert "3.1 g wrong" in text and "3.2 g_bar wrong" in text and log.read_text() == runs


def test_the_end_leaves_no_rank(tmp_path):
    run = Watched(learner_file(tmp_path, LAB, g="return x"), "--only", "3.1")
    run.verdicts()
    command = ["ps", "-o", "pid=", "--ppid", str(run._process.pid)]
    children: list[str] = []
    while len(children) < 2:  # the one that judges, and one that starts now, to take over from it
        children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    run.end()
    time.sleep(0.5)
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]
