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
    """A lab that runs with --watch."""

    def __init__(self, path, *arguments):
        self.path, self._lines = path, queue.Queue()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(path.parent)}
        command = [sys.executable, str(path), "--watch", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        threading.Thread(target=lambda: [self._lines.put(line) for line in self.process.stdout], daemon=True).start()

    def verdicts(self):
        """What the next judgement says."""
        text = ""
        while not re.search(r"^judged in [\d.]+ s", text, re.MULTILINE):
            text += self._lines.get(timeout=120)
        return " ".join(text.split())

    def put(self, body, **others):
        """Save another body of g, and of others, in place of the file."""
        beside = self.path.parent / "beside"
        beside.mkdir(exist_ok=True)
        learner_file(beside, LAB, seconds=9, g=body, **others).replace(self.path)

    def save(self, body, **others):
        """The same; what is said then."""
        self.put(body, **others)
        return self.verdicts()

    def end(self):
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture
def watched(tmp_path):
    file = learner_file(tmp_path, LAB, seconds=9, g="return x")
    run = Watched(file, "--only", "3.1,3.2", "--ranks", "2")
    assert "3.1 g wrong" in run.verdicts()
    yield run
    run.end()


def test_a_save_is_judged_by_ranks_that_stay_and_what_has_not_changed_is_not_run_again(watched, tmp_path):
    text = watched.save(LIST_GATHER)
    assert "it has no graph" in text and "not written yet: 3.2" in text
    assert "can't be loaded: SyntaxError" in watched.save("return (x")
    log = tmp_path / "runs of g_bar"
    g_bar = f'with open({str(log)!r}, "a") as log:\n        log.write("run ")\n    return x'
    text = watched.save("return x + 0", g_bar=g_bar)
    assert "this rank's own part" in text and "3.2 g_bar wrong" in text
    runs = log.read_text()
    for k in range(1, 4):
        text = watched.save(f"return x + {k}", g_bar=g_bar)
        assert "3.1 g wrong" in text and "3.2 g_bar wrong" in text and log.read_text() == runs


def test_a_save_that_is_superseded_is_one_line_and_a_summary_comes_once(watched):
    for body in ("import time\n    time.sleep(1)\n    return x", "while True:\n        pass"):  # one that ends, one not
        watched.put(body)
        time.sleep(1)
        text = watched.save(LIST_GATHER)
        before, _, after = text.partition("saved again: judging the new one")
        assert "it has no graph" in after and "next: 1.1" not in text
        # Before it stands what follows the verdicts of the last save.
        assert before.count("all labs:") == 1 and "passed" not in before.partition("(2 ranks)")[2]


def test_a_save_does_not_wait_for_a_process_that_starts(tmp_path):
    process = JudgeProcess()
    try:
        with pytest.raises(Outdated):
            list(process.ask(str(tmp_path), lambda: True, do="judge"))
        assert not process.ready and not process.busy
    finally:
        process.end()


@pytest.mark.nightly
def test_editors_that_empty_the_file_and_write_it_in_parts(watched, tmp_path):
    """All ranks judge one text, so no rank waits for one that judges another."""
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
    said = [watched.save(LIST_GATHER)]
    while "it has no graph" not in said[-1]:
        said.append(watched.verdicts())
    for text in said:
        assert not re.search("no end after|died|waiting", text), text
