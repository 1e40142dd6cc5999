"""What this code was put through, in a table of FINDINGS.md: ``make report``.

Faults and bad inputs are counted from a run of the tests marked ``fault`` and ``bad_input``; mutants and torch
versions from the results that ``make mutants`` and ``make matrix`` stored.  No number is typed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matrix
import mutants

from actmem.torch_private import CHECKED_ON

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".ci" / "report.json"
#: The seconds of each test file and of one case of a slow function in the last stored run, for tests/tiers.py.
DURATIONS = ROOT / "tests" / "durations.json"
START, END = "<!-- make report writes from here -->", "<!-- make report writes to here -->"
KINDS = {"fault": "faults survived", "bad_input": "bad inputs answered"}
PACKAGES = ("torch", "numpy", "rich", "pytest", "hypothesis")


def counts_of(report: str) -> dict[str, dict[str, int]]:
    """Of each kind, how many faults or inputs pytest's JUnit report has by outcome; a test may have tried many inputs."""
    found = {kind: {"passed": 0, "failed": 0, "skipped": 0} for kind in KINDS}
    for case in ElementTree.fromstring(report).iter("testcase"):
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        if properties.get("kind") in KINDS:
            ends = {child.tag for child in case}
            outcome = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            found[properties["kind"]][outcome] += int(properties.get("inputs", 1))
    return found


def durations(report: str, before: dict[str, float]) -> dict[str, float]:
    """The seconds of each test file, the longest first, and of a case of each function that takes a second or more.

    What the longest case takes beyond the others is of the fixtures: the others tell what one more costs.  Of a function
    with one case in this run, what was known ``before`` stays.
    """
    files: dict[str, float] = {}
    functions: dict[str, list[float]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        file, seconds = case.get("file", ""), float(case.get("time", 0))
        if file.startswith(("tests/", "notebooks/")):
            files[file] = files.get(file, 0.0) + seconds
        if file.startswith("tests/"):
            functions.setdefault(f"{file}::{case.get('name', '').partition('[')[0]}", []).append(seconds)
    of_a_case = {name: seconds for name, seconds in before.items() if len(functions.get(name, ())) == 1}
    of_a_case |= {
        name: round((sum(cases) - max(cases)) / (len(cases) - 1), 3)
        for name, cases in functions.items()
        if len(cases) > 1 and sum(cases) >= 1
    }
    return {file: round(time, 1) for file, time in sorted(files.items(), key=lambda item: -item[1])} | dict(
        sorted(of_a_case.items())
    )


def run_marked() -> str:
    """pytest's report of the marked tests, run two at a time: most of them wait for processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marked.xml"
        which = ["-m", " or ".join(KINDS), "tests"]
        arguments = ["-q", "-n", "2", "--dist", "worksteal", f"--junitxml={path}", *which]
        subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
        return path.read_text(encoding="utf-8")


def summary(results: dict, versions: list[dict], mutated: dict) -> str:
    """The table of FINDINGS.md, from stored results alone."""
    lines = ["| what | result | date | command |", "|---|---|---|---|"]
    if versions:
        working = sum(matrix.works(entry) == "yes" for entry in versions)
        last = max(entry["date"] for entry in versions)
        lines.append(f"| torch versions | {working} of {len(CHECKED_ON)} work | {last} | `make matrix` |")
    if mutated:
        caught = sum(bool(entry["caught"]) for entry in mutated["tried"])
        line = f"| mutants of the library | {caught} of {len(mutated['tried'])} caught"
        lines.append(f"{line} | {mutated['date']} | `make mutants` |")
    for kind, words in KINDS.items() if results else ():
        counts = results["counts"][kind]
        tried = counts["passed"] + counts["failed"]
        lines.append(f"| {words} | {counts['passed']:,} of {tried:,} | {results['date']} | `make report` |")
    return "\n".join(lines)


def with_summary(findings: str, text: str) -> str:
    before, rest = findings.split(START)
    return f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}"


def stored() -> tuple[dict, list[dict], dict]:
    """The latest results of ``make report``, ``make matrix`` and ``make mutants``."""
    return json.loads(RESULTS.read_text(encoding="utf-8")), matrix.read_results(), mutants.stored()


def main(arguments: list[str]) -> int:
    """Run, or read the report of a whole `make test` if its path is given, with how long each file took; store, write.

    Returns 1 if a fault or an input was not survived.
    """
    text = Path(arguments[0]).read_text(encoding="utf-8") if arguments else run_marked()
    if arguments:
        before = json.loads(DURATIONS.read_text(encoding="utf-8"))
        DURATIONS.write_text(json.dumps(durations(text, before), indent=1) + "\n", encoding="utf-8")
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "counts": counts_of(text),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = summary(*stored())
    findings = matrix.FINDINGS.read_text(encoding="utf-8")
    matrix.FINDINGS.write_text(with_summary(findings, table), encoding="utf-8")
    print(table)
    return int(any(counts["failed"] for counts in results["counts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
