"""Run several measurements on a GPU that is there for a short time only.

All results are written to disk after each measurement.  One that fails is skipped, and the file says why.
"""

import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from actmem_course.files import write_text

#: The reason of a step for which there was no time.
NO_TIME = "no time left"


class Session:
    """Runs measurements one after the other, and writes all results so far to ``path`` after each.

    Args:
        path: the JSON file; None keeps the results in memory only.
        seconds: after so many seconds no further measurement starts.
        say: a function that prints one line of progress.

    Attributes:
        results: the results so far: "date", "machine", "skipped", and a list of results for each group of measurements.
    """

    def __init__(self, path: Path | None, seconds: float, say: Callable[[str], None]):
        self.path, self.seconds, self.say = path, seconds, say
        self._started = time.monotonic()
        self.results: dict[str, Any] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "skipped": [],
        }

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._started

    def step(self, group: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Append ``{"name": name, **measure()}`` to ``results[group]``; if that fails, note why in "skipped".

        Args:
            group: the group of measurements, such as "table2".
            name: the measurement's name in this group.
            measure: runs the measurement, and returns its results.
        """
        entries = self.results.setdefault(group, [])
        self.attempt(f"{group}: {name}", lambda: entries.append({"name": name, **measure()}))

    def attempt(self, what: str, change: Callable[[], None]) -> None:
        """Call ``change``, which adds to the results; if it fails or there is no time left, note that as skipped.

        Args:
            what: the name of the measurement, for the line of progress and for the list of skipped measurements.
            change: runs the measurement, and adds its results to ``results``.
        """
        self.say(f"{self.elapsed:6.1f} s  {what}")
        reason = NO_TIME
        try:
            if self.elapsed < self.seconds:
                change()
                reason = ""
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        # What a failed step left behind must not make the next one fail.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if reason:
            self.results["skipped"].append({"step": what, "reason": reason})
            self.say(f"          skipped: {reason}")
        self.write()

    def write(self) -> None:
        """Write all results so far to the file. If writing fails, the old file is still there."""
        if self.path is not None:
            self.results["seconds"] = round(self.elapsed, 1)
            write_text(self.path, json.dumps(self.results, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return facts about the machine by name: device, memory, driver, versions of software, commit of the course."""
    found: dict[str, Any] = {
        "device": "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
        ),
    }
    for package in ("transformers", "peft", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["memory_bytes"] = properties.total_memory
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["cudnn"] = torch.backends.cudnn.version()
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None
