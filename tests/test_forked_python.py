"""A forked Python is the process that it stands for: same output, same end, same signals, nothing left."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from tests import rank_pool
from tests.forked_python import ForkedPython
from tests.patience import SECONDS

SCRIPT = """
import os, signal, subprocess, sys
print(sys.argv[1:], os.getcwd(), __name__, os.path.basename(__file__), sys.path[:2], os.environ.get("ODD"), sorted(os.listdir("/proc/self/fd"))[:4])
print("said", file=sys.stderr, flush=True)
print(sys.stdin.read(), flush=True)
exec({what!r})
"""
ENDS = {
    "comes to its end": "",
    "exits with a word": "sys.exit('word')",
    "leaves": "os._exit(4)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "starts another": "subprocess.run([sys.executable, __file__.replace('a.py', 'b.py')], check=True)",
    "has last words": "import atexit, threading; atexit.register(print, 'last'); threading.Thread(target=print).start()",
    "has an error": "1 / 0",
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    python = ForkedPython(tmp_path_factory.mktemp("a folder with spaces"))
    yield python.path
    python.stop()


def started(python, *arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ODD": " ü\n", **options.pop("environment", {})}
    pipe = subprocess.PIPE
    command = [python, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe, **options)


def ended(python, *arguments, **options):
    run = started(python, *arguments, **options)
    return *run.communicate("heard", timeout=SECONDS), run.returncode


@pytest.mark.parametrize("case", ENDS)
def test_it_is_as_the_real_one(case, forked, tmp_path):
    (tmp_path / "a.py").write_text(SCRIPT.format(what=ENDS[case]))
    (tmp_path / "b.py").write_text("print('the other')")
    files = ("a.py", "one", "two words", "")
    options = {"cwd": tmp_path, "environment": {"PYTHONPATH": str(tmp_path / "mine")}}
    (output, errors, code), real = (ended(python, *files, **options) for python in (forked, sys.executable))
    assert (output, code) == (real[0], real[2])
    # A traceback begins with the server's own frames.
    assert errors.splitlines()[:1] + errors.splitlines()[-2:] == real[1].splitlines()[:1] + real[1].splitlines()[-2:]


FROM = "import sys, torch; print('torch' in open('/proc/self/cmdline').read(), 'forked_python' in open('/proc/self/cmdline').read())"


def test_what_it_can_not_be_gets_the_real_python(forked, tmp_path):
    script = tmp_path / "a.py"
    script.write_text(FROM)
    assert ended(forked, script)[0] == "False True\n"
    script.write_text(FROM.replace(", torch", ""))  # a real Python would take seconds for it
    assert ended(forked, script, environment={"OMP_NUM_THREADS": "2"})[0] == "False False\n"
    assert ended(forked, script, environment={"PYTHONHASHSEED": "1"})[0] == "False False\n"
    assert ended(forked, "-m", "timeit", "-h")[0].startswith("Tool for measuring")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_signals_reach_it(name, forked, tmp_path):
    number = getattr(signal, name)
    (tmp_path / "a.py").write_text(
        "import os, signal, sys, time\nfor n in (2, 15): signal.signal(n, lambda n, f: sys.exit(40 + n))\n"
        "print(os.getpid(), flush=True)\nwhile True:\n    time.sleep(0.1)"
    )
    run = started(forked, str(tmp_path / "a.py"))
    pid = int(run.stdout.readline())
    run.send_signal(number)
    assert run.wait(SECONDS) == (-9 if name == "SIGKILL" else 40 + number)
    run.communicate()
    while os.path.exists(f"/proc/{pid}"):  # until the server has seen its end
        time.sleep(0.05)


def place(added):
    return dist.get_rank() + added


def fails_on_rank_0():
    if dist.get_rank() == 0:
        raise ValueError("mine")
    dist.barrier()


def test_a_rank_that_waits_for_one_that_failed_is_ended(pools, monkeypatch):
    monkeypatch.setattr(rank_pool, "AFTER_A_FAILURE", 1)
    with pytest.raises(rank_pool.RankFailed, match=r"(?s)ValueError: mine\n\nrank 1 did not answer within 1 s"):
        pools[2].run(fails_on_rank_0)
    assert pools[2].run(place, 3) == [3, 4]
