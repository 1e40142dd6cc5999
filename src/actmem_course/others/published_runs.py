"""python -m actmem_course.others.published_runs

Peaks that others published of their training runs, beside what ``actmem plan`` predicts.  It runs the commands, which
takes minutes, and writes the predictions of published_runs.tsv to published_predictions.tsv.  No constant is fitted.

published_runs.tsv: peak is as it was published, before what the source says was taken before the model, kind what was
measured.  command is what one types for the run, recomputes which of its plans the run was: no block recomputed, all
of them, or the ``part`` that --again names.  left out: why a run can't be predicted, where what it ran isn't stated
whole or no option says it.  why: the cause of a difference.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources

from actmem_course.others import table_rows

_UNITS = {"B": 1, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
#: Of the plans that ``actmem plan`` prints under "with all blocks alike".
_PLANS = ("no", "all", "part")


@dataclass(frozen=True)
class PublishedRun:
    """One run.

    Args:
        published_bytes: its peak, without what was taken before the model was there.
        kind: "allocated" tensors, memory "reserved" for them, or what "nvidia-smi" shows.
        predicted_bytes: what the command said; None if the run is left out.
    """

    name: str
    command: str
    recomputes: str
    published_bytes: int
    kind: str
    source: str
    left_out: str
    why: str
    predicted_bytes: int | None

    @property
    def difference_percent(self) -> float | None:
        """Predicted minus published, in percent of the published peak; None if the run is left out."""
        return None if self.predicted_bytes is None else 100 * (self.predicted_bytes / self.published_bytes - 1)


def published_runs() -> list[PublishedRun]:
    """All runs; those that are left out come last."""
    predicted = {row["run"]: int(row["bytes"]) for row in table_rows("published_predictions.tsv")}
    return [
        PublishedRun(
            row["run"],
            row["command"],
            row["recomputes"],
            round((float(row["peak"]) - float(row["before"])) * _UNITS[row["unit"]]),
            row["kind"],
            row["source"],
            row["left out"],
            row["why"],
            predicted.get(row["run"]),
        )
        for row in table_rows("published_runs.tsv")
    ]


def predictions(commands: set[str]) -> dict[str, list[int]]:
    """What each command prints as the bytes of its plans with all blocks alike, in the order of ``_PLANS``."""
    found = {}
    for command in sorted(commands):
        words = [sys.executable, "-m", "actmem_tools", *shlex.split(command)[1:], "--json", "-"]
        run = subprocess.run(words, capture_output=True, text=True)
        if run.returncode > 1:  # 1 says that it doesn't fit
            raise RuntimeError(f"{command} failed: {run.stderr.strip()}")
        found[command] = [way["bytes"] for way in json.loads(run.stdout)["all_blocks"]]
    return found


def predicted_bytes(runs: list[PublishedRun]) -> dict[str, int]:
    """What the commands of these runs say, by name of the run."""
    runs = [run for run in runs if run.command]
    plans = predictions({run.command for run in runs})
    return {run.name: plans[run.command][_PLANS.index(run.recomputes)] for run in runs}


def main() -> None:
    """Write published_predictions.tsv, and print it beside what was published."""
    lines = ["run\tbytes", *(f"{name}\t{size}" for name, size in predicted_bytes(published_runs()).items())]
    with resources.as_file(resources.files(__package__) / "published_predictions.tsv") as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for run in published_runs():
        predicted, apart = run.predicted_bytes, run.difference_percent
        told = f"not predicted: {run.left_out}" if predicted is None else f"{predicted:,} B predicted, {apart:+.1f}%"
        print(f"{run.name}: {run.published_bytes:,} B {run.kind}, {told}")


if __name__ == "__main__":
    main()
