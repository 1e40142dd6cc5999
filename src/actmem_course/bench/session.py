"""Run many jobs within a time limit; each job's results are on file even if a later one fails."""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

import actmem
from actmem_course.bench.timing import device_name, memory_bytes
from actmem_course.files import write_text
from actmem_course.ranks import Ranks
from actmem_course.results import plain

_Result = TypeVar("_Result")
_Other = TypeVar("_Other")
#: How a layer can be shared: the arguments of ``tensor_parallel`` for each.
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor+sequence": {"sequence_parallel": True},
    "tensor+sequence, plain": {"sequence_parallel": True, "keep_gathered_input": True},
}


class OutOfTime(BaseException):
    """The time given to all jobs together is over.

    Not an Exception, so that a job which catches failures of its parts doesn't catch this.
    """


@dataclass
class Session:
    """What has been measured so far, written to ``path`` after every job.

    A job that fails, or has no time left, is noted in ``results["skipped"]`` and the next one runs.
    """

    ranks: Ranks
    dtype: torch.dtype
    seconds: float
    path: Path | None = None
    say: Callable[[str], None] = lambda text: None
    results: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self.results.update(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine=machine(self.ranks.device),
            settings={"tensor_parallel_size": self.ranks.size, "dtype": str(self.dtype).removeprefix("torch.")},
            cases=[], skipped=[],
        )  # fmt: skip

    @property
    def left(self) -> float:
        """Seconds that jobs may still take."""
        return self.seconds - (time.monotonic() - self._started)

    def job(self, name: str, run: Callable[[], _Result], otherwise: _Other = None) -> _Result | _Other:  # type: ignore[assignment]
        """What ``run()`` gives; ``otherwise`` if it failed or had no time."""
        self.say(name)
        try:
            if self.left <= 0:
                raise OutOfTime
            with _alarm(self.left):
                return run()
        except OutOfTime:
            self._skip(name, "no time left")
        except Exception as error:
            self._skip(name, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        finally:
            # Otherwise what a failed job left behind could make the next one fail.
            gc.collect()
            if self.ranks.device == "cuda":
                torch.cuda.empty_cache()
            self.write()
        return otherwise

    def write(self) -> None:
        """Put all results so far into the file, or leave the old file as it is."""
        if self.path is not None:
            self.results["seconds"] = round(time.monotonic() - self._started, 1)
            write_text(self.path, json.dumps(self.results, default=plain, indent=1) + "\n")

    def _skip(self, name: str, reason: str) -> None:
        self.results["skipped"].append({"job": name, "reason": reason})
        self.say(f"{name}: skipped, {reason}")


def machine(device: str) -> dict:
    """What was measured with: device, driver, versions."""
    found = {
        "device": device_name(device),
        "memory_bytes": memory_bytes(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.system(),
        "actmem": actmem.__version__,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "megatron_core": _version("megatron-core"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n")
    return lines[0].strip() or None if done.returncode == 0 else None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after ``seconds``, between two operations.  Main thread only; nothing on Windows."""
    if os.name == "nt":
        yield
        return

    def ring(signum, frame):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
