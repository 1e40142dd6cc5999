"""Two hosts: labs/slurm.sbatch runs the pipeline across them, and when one is gone the run says so and ends.

The hosts are network namespaces of this machine, and srun and scontrol stand-ins that know them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actmem_course.launch import LABS
from tests.labs.faults import Started

ENDLESS = ["labs/train.py", "--steps", "1000000", "--device", "cpu"]


@pytest.fixture
def tools(tmp_path):
    """The folder of what stands in for Slurm, where two hosts are; it needs Linux, root and ip."""
    try:
        make_hosts()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN.format(on_a=prefix("a"), on_b=prefix("b"))}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        yield tmp_path
    finally:
        for namespace in HOSTS.values():
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            shutil.rmtree(_ETC / namespace, ignore_errors=True)


def sbatch(tools, *arguments):
    """The job as Slurm starts it on the first of its hosts."""
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host-[a-b]"}
    # torchrun of the Python that runs this, before another on the PATH.
    path = os.pathsep.join([str(tools), os.path.dirname(sys.executable), os.environ["PATH"]])
    command = ["sh", "-c", 'cd "$0" && exec bash labs/slurm.sbatch "$@"', str(LABS.parent), *arguments]
    return Started(command, tools, PATH=path, TORCH_CPP_LOG_LEVEL="ERROR", **slurm)


def own_lines(errors):
    return sorted(line for line in errors if line.startswith("train.py: "))


def started(tools):
    """A training across both hosts that has got somewhere."""
    run = sbatch(tools, *ENDLESS)
    for line in run.process.stdout:
        if line.startswith("step 3:"):
            return run
    raise AssertionError(run.end())


def test_two_stages_of_two_ranks_on_two_hosts(tools):
    run = sbatch(tools)
    code, output, errors = run.end()
    assert code == 0, errors
    assert "4 of 4 ranks agree with the formulas to the byte" in output
    assert run.nothing_is_left()


@pytest.mark.nightly
def test_every_measuring_lab_across_two_hosts(tools):
    path = tools / "host.json"
    run = sbatch(tools, "labs/measure_host.py", "--quick", "--device", "cpu", "--json", str(path))
    code, output, errors = run.end()
    assert code == 0 and "6 of 6 labs agree with their formulas." in output, (output, errors)
    labs = json.loads(path.read_text())["labs"].values()
    assert len(labs) == 6 and all(found["rows"] for found in labs)
    assert run.nothing_is_left()


def test_a_host_crashes(tools):
    """Slurm ends the other host's ranks, which may say before that they have lost a connection."""
    run = started(tools)
    for number in processes("b"):
        os.kill(number, signal.SIGKILL)
    code, _, errors = run.end()
    lines = own_lines(errors)
    assert code and all(re.match(r"train.py: rank [01]: .*(closed|reset) by peer", line) for line in lines), errors
    assert run.nothing_is_left()


#: Each host's network namespace, and its address, which only the two know.
HOSTS = {host: f"actmem-{os.getpid()}-{host}" for host in "ab"}
ADDRESSES = {"a": "10.213.87.1", "b": "10.213.87.2"}
#: What the names of a host's namespace are read from, by ``ip netns exec``.
_ETC = Path("/etc/netns")

SCONTROL = """#!/bin/sh
echo host-a
echo host-b
"""
#: Runs the command on both hosts at once.  When one fails the other is ended too: --kill-on-bad-exit.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && [ "${{2%%=*}}" = --cpus-per-task ] && shift 2 || exit 2
{on_a} "$@" & {on_b} "$@" &
for _ in 1 2; do
    wait -n && continue
    kill $(jobs -p) 2>/dev/null
    sleep 5
    kill -9 $(jobs -p) 2>/dev/null
    exit 1
done
"""


def make_hosts():
    """host-a and host-b, with a cable between them."""
    names = "".join(f"{address} host-{host}\n" for host, address in ADDRESSES.items())
    for namespace in HOSTS.values():
        ip("netns", "add", namespace)
        (_ETC / namespace).mkdir(parents=True)
        (_ETC / namespace / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    ends = [("name", "cable", "netns", namespace) for namespace in HOSTS.values()]
    ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for host, namespace in HOSTS.items():
        ip("-n", namespace, "address", "add", f"{ADDRESSES[host]}/24", "dev", "cable")
        for device in ("lo", "cable"):
            ip("-n", namespace, "link", "set", device, "up")


def prefix(host):
    """What runs a command on a host, to be followed by its words."""
    name = f'hostname host-{host} && exec "$@"'
    return f"ip netns exec {HOSTS[host]} unshare --uts sh -c '{name}' sh"


def processes(host):
    """The numbers of the processes on a host."""
    done = subprocess.run(["ip", "netns", "pids", HOSTS[host]], check=True, capture_output=True, text=True)
    return [int(number) for number in done.stdout.split()]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
