"""python labs/measure_published.py

GPU peaks that others published of their training runs, beside what `actmem plan` says of the same run. It runs the
commands, which takes minutes and no GPU, and keeps their answers for chapter 9. No constant is fitted. Exit code 0,
whatever the differences: chapter 9 has their causes.
"""

import json
import shlex
import subprocess
import sys
from importlib import resources

from actmem.config import ConfigError
from actmem_course import others
from actmem_course.arguments import LabParser
from actmem_course.launch import LABS
from actmem_course.others.published_runs import PublishedRun, published_runs
from actmem_course.process import lab

#: Of the plans that ``actmem plan`` prints under "with all blocks alike".
PLANS = ("no", "all", "part")


@lab
def main() -> int:
    LabParser(prog="measure_published.py", description=__doc__.partition("\n\n")[2]).parse_args()
    lines = ["name\tbytes", *(f"{name}\t{size}" for name, size in predicted_bytes(published_runs()).items())]
    with resources.as_file(resources.files(others) / "published_predictions.tsv") as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for run in published_runs():
        predicted, apart = run.predicted_bytes, run.difference_percent
        told = f"not predicted: {run.left_out}" if predicted is None else f"{predicted:,} B predicted, {apart:+.1f}%"
        print(f"{run.name}: {run.published_bytes:,} B {run.kind}, {told}")
    return 0


def predicted_bytes(runs: list[PublishedRun]) -> dict[str, int]:
    """What the commands of these runs say, by name of the run."""
    runs = [run for run in runs if run.command]
    plans = {command: planned_bytes(command) for command in sorted({run.command for run in runs})}
    return {run.name: plans[run.command][PLANS.index(run.recomputes)] for run in runs}


def planned_bytes(command: str) -> list[int]:
    """What a command prints as the bytes of its plans with all blocks alike, in the order of ``PLANS``."""
    words = [sys.executable, "-m", "actmem_tools", *shlex.split(command)[1:], "--json", "-"]
    run = subprocess.run(words, cwd=LABS.parent, capture_output=True, text=True)
    if run.returncode > 1:  # 1 says that it doesn't fit
        raise ConfigError("command", f"{command} failed: {run.stderr.strip()}")
    return [way["bytes"] for way in json.loads(run.stdout)["all_blocks"]]


if __name__ == "__main__":
    sys.exit(main())
