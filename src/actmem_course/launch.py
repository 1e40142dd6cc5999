"""Start a lab from a notebook or a test as a subprocess, and read its results as JSON.

It is a subprocess because functions defined in a notebook can't be sent to new processes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

#: Where the labs are: beside src/ in the checkout that this package runs from.
LABS = Path(__file__).resolve().parents[2] / "labs"


class LabError(RuntimeError):
    """A lab ended with an error.  The message is the lab's own last line."""


def rank_environment(number: int, size: int, address: tuple[str, int] | None = None) -> dict[str, str]:
    """Return the environment variables with which to start one rank as a subprocess.

    Args:
        number: the rank's number, from 0.
        size: how many ranks there are, all on this host.
        address: host and port of the store where the ranks meet, if another process serves this store; None
            leaves MASTER_ADDR and MASTER_PORT unset.
    """
    place: dict[str, object] = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if address:  # by the last of these, rank 0 does not look for a port to serve a store on
        place |= {"MASTER_ADDR": address[0], "MASTER_PORT": address[1], "TORCHELASTIC_USE_AGENT_STORE": True}
    # One thread for each rank: more would fight over the cores.  The store's C++ side writes pages when a rank is gone.
    usual = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    outer_job = ("MASTER_", "GROUP_", "TORCHELASTIC_")  # such as torchrun's around a judge
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(outer_job)}
    return {**usual, **inherited, **{name: str(value) for name, value in place.items()}}


def run(script: str, *arguments: object, processes: int | None = None) -> subprocess.CompletedProcess:
    """Run a lab as a subprocess and wait until it ends.

    Args:
        script: the lab's file name in labs/, such as "measure_table2.py".
        arguments: the lab's command-line arguments; ``str`` is called on each.
        processes: how many ranks the lab starts; None: the lab is one process.

    Returns:
        The finished process, with its output as text.
    """
    command = [sys.executable, str(LABS / script), *map(str, arguments)]
    if processes is not None:
        command += ["--ranks", str(processes)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600)


def results(script: str, *arguments: object, processes: int | None = None) -> list[dict]:
    """Run a lab and return the rows that it writes to ``--json``.

    Exit code 1 (it measured, and something differs from the prediction) doesn't count as a failure.

    Args:
        script: the lab's file name in labs/, such as "measure_table2.py".
        arguments: the lab's command-line arguments, without --json; ``str`` is called on each.
        processes: how many ranks the lab starts; None: the lab is one process.

    Raises:
        LabError: The lab failed; the message is the last line that it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        done = run(script, *arguments, "--json", path, processes=processes)
        if not path.exists():
            raise LabError((done.stderr.splitlines() or [f"{script} ended with exit code {done.returncode}"])[-1])
        return json.loads(path.read_text(encoding="utf-8"))
