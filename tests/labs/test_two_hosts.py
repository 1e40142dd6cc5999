"""Two hosts: labs/slurm.sbatch runs the pipeline across them, and when one is gone the run says so and ends.

The hosts are network namespaces of this machine, and srun and scontrol stand-ins that know them.
"""

import os
import re
import signal
import subprocess
import sys

import pytest

from actmem_course.guard import ABSENT_SECONDS
from actmem_course.launch import LABS
from tests.labs.faults import Started
from tests.labs.hosts import TwoHosts

ENDLESS = ["labs/train.py", "--steps", "1000000", "--device", "cpu"]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts; where there can't be any, a skip with the reason, and in CI a failure."""
    made = TwoHosts(tmp_path)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        reason = (
            f"NOTHING WAS TESTED ACROSS HOSTS: it needs Linux, root and ip: {getattr(error, 'stderr', '') or error}"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield made
    made.remove()


def sbatch(hosts, *arguments):
    """The job as Slurm starts it on the first of its hosts."""
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host-[a-b]"}
    # torchrun of the Python that runs this, before another on the PATH.
    path = os.pathsep.join([str(hosts.tools), os.path.dirname(sys.executable), os.environ["PATH"]])
    command = ["sh", "-c", 'cd "$0" && exec bash labs/slurm.sbatch "$@"', str(LABS.parent), *arguments]
    return Started(command, hosts.folder, PATH=path, TORCH_CPP_LOG_LEVEL="ERROR", **slurm)


def own_lines(errors):
    return sorted(line for line in errors if line.startswith("train.py: "))


def started(hosts):
    """A training across both hosts that has got somewhere."""
    run = sbatch(hosts, *ENDLESS)
    for line in run.process.stdout:
        if line.startswith("step 3:"):
            return run
    raise AssertionError(run.end())


def test_two_stages_of_two_ranks_on_two_hosts(hosts):
    run = sbatch(hosts)
    code, output, errors = run.end()
    assert code == 0, errors
    assert "4 of 4 ranks agree with the formulas to the byte" in output
    assert run.nothing_is_left()


@pytest.mark.fault
def test_a_cable_is_cut(hosts):
    run = started(hosts)
    assert len(hosts.processes("a")) == len(hosts.processes("b")) == 3  # torchrun and two ranks
    hosts.cut()
    code, _, errors = run.end()
    seconds = ABSENT_SECONDS
    assert code and own_lines(errors) == [
        f"train.py: rank 0: no sign of rank 2 for {seconds} s: its host, or the network to it, is gone",
        f"train.py: rank 2: no answer from host-a for {seconds} s: that host, or the network to it, is gone",
    ]
    assert run.nothing_is_left()


@pytest.mark.fault
def test_a_host_crashes(hosts):
    run = started(hosts)
    for number in hosts.processes("b"):
        os.kill(number, signal.SIGKILL)
    code, _, errors = run.end()
    lines = own_lines(errors)
    assert code and len(lines) == 1, errors
    assert re.fullmatch(r"train.py: rank [01]: ranks 2, 3 died: killed, or crashed", lines[0])
    assert run.nothing_is_left()
