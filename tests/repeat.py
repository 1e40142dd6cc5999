"""Count crashes: python -m tests.repeat --main-job 200 --lab6 100

Runs the main job on four ranks, and lab 6's solution on two, so many times, one after the other, and adds to
tests/repeat.json how many ended otherwise than with 0, with the end of what they wrote.  ``make report`` shows the sums.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import date
from pathlib import Path

from actmem_course import launch
from actmem_course.cut import lab_source
from tests.labs.stuck import start

RESULTS = Path(__file__).resolve().with_name("repeat.json")


def main_job(folder: Path):
    return launch.run("measure_table2.py", processes=4)


def lab6(folder: Path):
    file = folder / "lab6_train.py"
    file.write_text(lab_source(file.stem), encoding="utf-8")
    return start(file, "--solution")


JOBS = {"main_job": main_job, "lab6": lab6}
WORDS = {"main_job": "the main job on four ranks", "lab6": "lab 6's training on two"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__.split("\n\n")[0])
    for name in JOBS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, metavar="N")
    wanted = vars(parser.parse_args())
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, job in JOBS.items():
        entry = found.setdefault(name, {"runs": 0, "crashes": []})
        for _ in range(wanted[name]):
            with tempfile.TemporaryDirectory() as folder:
                done = job(Path(folder))
            entry["runs"], entry["date"] = entry["runs"] + 1, date.today().isoformat()
            if done.returncode:
                entry["crashes"].append({"code": done.returncode, "errors": done.stderr[-2000:]})
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {len(entry['crashes'])} of {entry['runs']} runs ended otherwise than with 0")
    return int(any(entry["crashes"] for entry in found.values()))


if __name__ == "__main__":
    sys.exit(main())
