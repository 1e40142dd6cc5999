"""``python -m actmem_course.judge FOLDER`` judges a class's files; ``… progress`` shows your own over all labs."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from actmem.config import ConfigError
from actmem_course.arguments import LabParser
from actmem_course.files import check_files, replacing
from actmem_course.judge.descendants import adopt_orphans, end_descendants
from actmem_course.judge.learner_progress import LearnerProgress, reading
from actmem_course.judge.outline import lab_name, load_lab
from actmem_course.judge.verdict import PASSED
from actmem_tools.command_line import screen

_RUN = "import sys; from actmem_course.judge import main; sys.argv = sys.argv[1:]; sys.exit(main({names}))"

#: Longer verdicts are not read.
_MOST_BYTES = 2**22


@dataclass(frozen=True)
class JudgedFile:
    """One file of a class.  statuses: by exercise, "" if it isn't judged.  why: what ended it, if something did."""

    file: Path
    lab: str
    statuses: dict[str, str]
    why: str = ""


def main() -> int:
    """Judge a folder, or show or reset the progress.  Exit code 0, or 2 on wrong use."""
    parser = LabParser(prog="actmem_course.judge", description=__doc__)
    parser.add_argument("what", metavar="FOLDER|progress", help="a folder with files of learners, or the word progress")
    parser.add_argument(
        "--reset", action="store_true", help="progress: forget what has passed and which hints were given"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the folder's table to FILE")
    parser.add_argument(
        "--seconds", type=float, default=300, metavar="S", help="a file may take so long (default: 300)"
    )
    args = parser.parse_args()
    with parser.refusing():
        if args.what == "progress":
            return _progress(args.reset)
        if not 0 < args.seconds < math.inf:
            raise ConfigError("seconds", f"must be positive, got {args.seconds:g}")
        check_files(args, "csv")
        folder = Path(args.what)
        if not folder.is_dir():
            raise ConfigError("what", f"must be a folder or the word progress, got {args.what}")
        files = [path for path in sorted(folder.rglob("*.py")) if _lab_of(path)]
        if not files:
            raise ConfigError("what", f"{folder} has no Python file that says which lab it is")
    console = screen(highlight=False, emoji=False)
    found = []
    adopt_orphans()
    for file in files:
        console.print(Text(f"judging {file.relative_to(folder)}", style="dim"))
        found.append(judge_file(file, args.seconds))
    console.print(_table(found, folder))
    if args.csv:
        _write_csv(found, folder, args.csv)
    return 0


def _lab_of(path: Path) -> str:
    try:
        return lab_name(path, _docstring(path))
    except ConfigError:
        return ""


def _docstring(path: Path) -> str:
    try:
        return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except (OSError, SyntaxError, ValueError):
        return ""


def judge_file(file: Path, seconds: float) -> JudgedFile:
    """Judge one file in a process of its own, which ends after ``seconds``, and end all that it has started."""
    lab = load_lab(_lab_of(file))
    names = {"__file__": str(file.resolve()), "__doc__": _docstring(file)}
    ours, theirs = os.pipe()
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(1) as thread:
        # The verdicts come over a pipe that the judge holds, and not the processes that it starts for the file.
        verdicts = f"/dev/fd/{theirs}"
        command = [sys.executable, "-c", _RUN.format(names=names), file.name, "--verdicts-only", "--json", verdicts]
        environment = {**os.environ, "XDG_CACHE_HOME": cache}  # a learner's progress is nobody else's
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True, pass_fds=[theirs]
        )
        os.close(theirs)
        reading = thread.submit(_read, ours)  # meanwhile: a pipe holds 64 KiB
        why = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            why = f"no end after {seconds:g} s"
            process.send_signal(signal.SIGTERM)  # it ends its ranks, and itself
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            with suppress(ProcessLookupError):  # what the file has started as well, which could go on beside the next
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            all_ended = end_descendants()
        text = reading.result()
    judged = _statuses(text)
    if not judged:
        said = "its verdicts are too long, or damaged" if text else f"ended with exit code {process.returncode}"
        why = why or said
    if not all_ended:
        why = why or "processes that it has started can't be ended"
    return JudgedFile(file, lab.name, {e.number: judged.get(e.number, "") for e in lab.exercises}, why)


def _read(pipe: int) -> bytes:
    with open(pipe, "rb") as verdicts:
        return verdicts.read(_MOST_BYTES)


def _statuses(text: bytes) -> dict[str, str]:
    """The status of each exercise; none if the text has another form."""
    try:
        return {v["exercise"]: v["status"] for v in json.loads(text)["verdicts"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _table(found: list[JudgedFile], folder: Path) -> Table:
    """A line for each file: how many have passed, and what has not."""
    table = Table("file", "lab", "passed", "not passed", box=None)
    for judged in found:
        statuses = judged.statuses.values()
        count = f"{sum(status == PASSED for status in statuses)} of {len(statuses)}"
        left = ", ".join(f"{n} {status}" for n, status in judged.statuses.items() if status not in ("", PASSED))
        table.add_row(str(judged.file.relative_to(folder)), judged.lab.partition("_")[0], count, judged.why or left)
    return table


def _write_csv(found: list[JudgedFile], folder: Path, path: Path) -> None:
    with replacing(path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "lab", "exercise", "status", "why"])
        for judged in found:
            for number, status in judged.statuses.items():
                row = [str(judged.file.relative_to(folder)), judged.lab, number, status, judged.why]
                writer.writerow([_escaped(cell) for cell in row])


def _escaped(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _progress(reset: bool) -> int:
    progress = LearnerProgress()
    if reset:
        progress.reset()
    console = screen(highlight=False, emoji=False)
    console.print(progress.table())
    console.print(Text(progress.summary()), soft_wrap=True)
    if found := progress.next():
        lab, exercise = found
        console.print(
            Text(f"next: {exercise.number} in my/labs/{lab.name}.py; read {reading(lab, exercise)}"), soft_wrap=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
