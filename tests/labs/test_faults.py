"""Whatever happens to a lab: it ends, with an exit code that says so, in one line, and leaves nothing behind."""

import re
import signal
import sys
from typing import Any

import pytest

from actmem_course import launch
from tests.labs.faults import Started, listening, planted
from tests.labs.in_process import shown_in_80_columns
from tests.labs.learners import learner_file
from tests.tiers import at_night

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads processes from /proc")
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def own_lines(errors):
    """The lab's lines among torchrun's; none of them may be of a rank's traceback.

    torch's C++ side may write "[rank1]:[W…", and its stack, when torchrun is gone while a rank asks its store.
    """
    assert not [line for line in errors if re.match(r"\[rank\d+\]: ", line)]
    assert sum(line.startswith("Traceback") for line in errors) <= 1  # torchrun's own
    return [line for line in errors if line.startswith("measure_")]


#: A fault, how it is planted, and what is said.
SAID: list[Any] = [
    ("is killed", {"place": "a collective"}, "rank 1 was ended by SIGKILL"),
    at_night(("is killed", {"place": "backward"}, "rank 1 was ended by SIGKILL")),
    ("raises", {}, r"rank 1: ValueError: planted \(measure_parity.py:\d+; for more"),
    # No parent sees more than an exit code of 0: another rank says that it has lost one.
    at_night(("leaves", {}, r"rank 0: RuntimeError: .*Connection closed by peer")),
    # Nothing exists yet over which one could hear of the others, but the store where they meet.
    at_night(("loops", {"GLOO_SOCKET_IFNAME": "nosuch0"}, "rank [01]: RuntimeError: .*nosuch0.*")),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "planting", "said"), SAID)
def test_a_fault_is_one_line_that_names_a_rank_and_the_cause(fault, planting, said, tmp_path):
    run = planted(tmp_path, fault, **planting)
    code, output, (line,) = run.end()
    assert (code, output) == (1, "") and re.match(f"measure_parity.py: {said}", line), line
    assert run.nothing_is_left()


# By day the parent of judged ranks is killed, below.
@pytest.mark.parametrize("name", [*map(at_night, ("SIGTERM", "SIGHUP", "SIGKILL")), "SIGINT"])
def test_the_parent_is_ended_and_its_ranks_with_it(name, tmp_path):
    run = planted(tmp_path, "loops")
    run.wait_for_the_loop()
    if name == "SIGTERM":
        assert len(run.alive()) == 3
        assert listening(run.alive()) and listening(run.alive()) <= LOOPBACK
    number = getattr(signal, name)
    if name == "SIGINT":
        run.harm(number, group=True)  # Ctrl-C reaches the whole group
    else:
        run.harm(number)
    code, output, errors = run.end()
    assert code == {"SIGTERM": 143, "SIGHUP": 129, "SIGKILL": -9, "SIGINT": 130}[name]
    assert len(errors) <= 1 and output == ""
    if name in ("SIGTERM", "SIGHUP"):
        assert errors == [f"measure_parity.py: ended by {name}"]
    assert run.nothing_is_left()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_torchrun_is_ended_and_its_ranks_with_it(name, tmp_path):
    run = planted(tmp_path, "loops", torchrun=True)
    run.wait_for_the_loop()
    ranks = [number for number in run.alive() if number != run.process.pid]
    assert len(ranks) == 2 and listening(ranks) <= LOOPBACK  # torchrun's own store listens on every interface
    run.harm(getattr(signal, name))
    code, output, errors = run.end()
    assert code and len(own_lines(errors)) <= 1
    assert run.nothing_is_left()


#: An answer of lab 3 that never comes to an end, and one that ends the process as if all were well.
LOOPS = "from pathlib import Path; import os; Path(os.environ['ACTMEM_LOOPS']).touch()\n    while True:\n        pass"


@pytest.mark.parametrize("name", [at_night("SIGTERM"), at_night("SIGHUP"), "SIGKILL"])
def test_the_parent_of_judged_ranks_is_ended_and_its_ranks_with_it(name, tmp_path):
    file = learner_file(tmp_path, "lab3_sequence_parallel", seconds=10_000, g=LOOPS)
    run = Started([sys.executable, str(file), "--only", "3.1"], tmp_path)
    run.wait_for_the_loop()
    assert listening(run.alive()) <= LOOPBACK
    run.harm(getattr(signal, name))
    code, output, errors = run.end()
    assert code in (143, 129, -9) and "passed" not in output
    assert run.nothing_is_left()


EMULATED = [str(launch.LABS / "measure_table2.py"), "--emulate", "4"]


#: With the stream that PYTHONIOENCODING=ascii gives to a Python that starts.
ASCII = "import runpy, sys; sys.stdout.reconfigure(encoding='ascii'); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.nightly
def test_nowhere_to_print(tmp_path):
    command = ["sh", "-c", '"$@" >/dev/full', "sh", sys.executable, *EMULATED]
    line = "measure_table2.py: cannot write standard output: No space left on device"
    assert Started(command, tmp_path).end() == (1, "", [line])


@pytest.mark.nightly
def test_a_narrow_screen_and_a_poor_encoding_lose_no_digit(tmp_path):
    code, output, errors = Started([sys.executable, "-c", ASCII, *EMULATED], tmp_path, COLUMNS="40").end()
    wide = shown_in_80_columns("measure_table2.py", *EMULATED[1:])
    assert (code, errors) == (0, []) and output.isascii()
    numbers = re.findall(r"\d[\d,]{5,}", wide)
    assert len(numbers) > 10 and re.findall(r"\d[\d,]{5,}", output) == numbers
