"""--watch: ranks that stay judge at each save; one that dies or hangs is replaced."""

import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time

import pytest

from tests.labs.stuck import learner_file

LAB = "lab3_sequence_parallel"
LIST_GATHER = """parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)"""


class Watched:
    """A lab that runs with --watch; every verdict that it prints."""

    def __init__(self, path, *arguments):
        self.path, self._lines = path, queue.Queue()
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
            self._lines.put(line)

    def verdicts(self):
        """What the next judgement says, and its time."""
        text = ""
        while True:
            line = self._lines.get(timeout=120)
            text += line
            if line.startswith("judged in"):
                return " ".join(text.split()), float(re.search(r"judged in ([\d.]+) s", line)[1])

    def save(self, body):
        """Save another body of g; what is said then."""
        beside = self.path.parent / "beside"
        beside.mkdir(exist_ok=True)
        learner_file(beside, LAB, seconds=9, g=body).replace(self.path)
        return self.verdicts()

    def end(self):
        self._process.terminate()
        return self._process.wait(30)


@pytest.fixture
def watched(tmp_path):
    run = Watched(learner_file(tmp_path, LAB, seconds=9, g="return x"), "--only", "3.1,3.2")
    yield run
    run.end()


def test_a_save_is_judged_by_ranks_that_stay(watched):
    assert "3.1 g wrong" in watched.verdicts()[0]
    text, _ = watched.save(LIST_GATHER)
    assert "it has no graph" in text and "3.2 g_bar not written yet" in text
    assert "can't be loaded: SyntaxError" in watched.save("return (x")[0]
    assert "this rank's x" in watched.save("return x + 0")[0]


def test_ranks_that_die_or_hang_are_replaced(watched):
    watched.verdicts()
    text, _ = watched.save("import ctypes\n    ctypes.CDLL(None)._exit(0)")
    assert re.search(
        r"3\.1 g wrong rank \d died: it ended the process by itself, with exit code 0 and without a verdict", text
    )
    assert "this rank's x" in watched.save("return x + 0")[0]
    text, _ = watched.save("while True:\n        pass")
    assert re.search(r"no end after 9 s: rank 0 is at lab3_sequence_parallel.py:\d+, in g; rank 1 is at", text), text
    assert "this rank's x" in watched.save("return x * 1")[0]


def test_what_has_not_changed_keeps_its_verdict(watched):
    watched.verdicts()
    times = [watched.save(f"return x + {k}")[1] for k in range(5)]
    assert statistics.median(times) < 5  # idle cores take a tenth of it


def test_the_end_leaves_no_rank(tmp_path):
    run = Watched(learner_file(tmp_path, LAB, g="return x"), "--only", "3.1")
    run.verdicts()
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(run._process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(children) == 2
    run.end()
    time.sleep(0.5)
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]
