"""Labs with faults planted in them, and what is left of their processes."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from actmem_course.launch import LABS
from tests.patience import SECONDS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

#: What rank 1 does in a planted place, by name.
FAULTS = {
    "is well": "pass",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "raises": "raise ValueError('planted\\nsecond line')",
    "leaves": "os._exit(0)",
    "loops": "time.sleep(10**6)",
}
#: Each fault, and each signal, has ended everything after so long.
LIMIT_SECONDS = 60
_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from actmem.layers.transformer import MLP
from actmem.parallel import linear

def planted(owner, name):
    before = getattr(owner, name)
    def run(*args, **kwargs):
        if os.environ.get("RANK") == "1":
            Path(os.environ["ACTMEM_LOOPS"]).touch()
            {fault}
        return before(*args, **kwargs)
    setattr(owner, name, run if owner in (MLP, dist) else staticmethod(run))

if "RANK" in os.environ:
    planted(*{{"forward": (MLP, "forward"), "backward": (linear.FUNCTIONS["column_parallel"], "backward"), "a collective": (dist, "all_reduce")}}[{place!r}])
exec(compile(Path({path!r}).read_text(), {path!r}, "exec"))
"""


class Started:
    """A running command: its process, and everything that descends from it, known by a mark."""

    def __init__(self, command, folder, **environment):
        self.mark = uuid.uuid4().hex
        self.looping = Path(folder) / "loops"
        self.harmed = 0.0
        environment = {"OMP_NUM_THREADS": "1", **environment, "ACTMEM_MARK": self.mark}
        environment["ACTMEM_LOOPS"] = str(self.looping)
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def wait_for_the_loop(self):
        """Until a rank does what "loops" says."""
        end = time.monotonic() + SECONDS
        while not self.looping.exists():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)

    def harm(self, number, group=False):
        """Send a signal to what was started, or to its whole process group."""
        self.harmed = time.time()
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self):
        """Wait for the end of the process; its code, its output, and the lines of its errors."""
        output, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output, errors.splitlines()

    def alive(self):
        """Every process that was started for this one and is still there, by number."""
        found = []
        for number in (name for name in os.listdir("/proc") if name.isdigit()):
            try:
                with open(f"/proc/{number}/environ", "rb") as file:
                    if self.mark.encode() in file.read():
                        found.append(int(number))
            except OSError:
                continue
        return found

    def nothing_is_left(self):
        """Whether all processes are gone in time, from the fault or the signal on; those that are not are killed."""
        end = time.monotonic() + SECONDS
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        left = self.alive()
        harmed = self.harmed or (self.looping.stat().st_mtime if self.looping.exists() else time.time())
        seconds = time.time() - harmed
        for number in left:
            os.kill(number, signal.SIGKILL)
        return not left and seconds < LIMIT_SECONDS


def planted(folder, fault, place="forward", torchrun=False, **environment):
    """Start a lab on two ranks where rank 1 comes to harm."""
    script = Path(folder) / "measure_parity.py"
    script.write_text(_SCRIPT.format(fault=FAULTS[fault], place=place, path=str(LABS / script.name)))
    command = [*TORCHRUN, str(script)] if torchrun else [sys.executable, str(script), "--ranks", "2"]
    return Started(command, folder, **environment)


def listening(processes):
    """The addresses on which these processes listen, as Linux writes them: hexadecimal."""
    sockets = set()
    for number in processes:
        folder = f"/proc/{number}/fd"
        try:
            sockets |= {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.add(fields[1].partition(":")[0])
    return found
