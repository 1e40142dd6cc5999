"""One page on what this code was put through: ``make report`` writes build/report.md and a summary into README.md.

Faults and bad inputs are counted from a run of the tests marked ``fault`` and ``bad_input``; mutants and torch
versions from the results that ``make mutants`` and ``make matrix`` stored.  No number is typed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matrix
import mutants

from actmem.torch_private import CHECKED_ON

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "build" / "report.md"
#: What `make test` leaves: how long it took, and on what day.
LAST_TESTS = ROOT / "build" / "tests.xml"
RESULTS = ROOT / ".ci" / "report.json"
#: The seconds of each test file and of one case of a slow function in the last stored run, for tests/tiers.py.
DURATIONS = ROOT / "tests" / "durations.json"
START, END = "<!-- make report writes from here -->", "<!-- make report writes to here -->"
KINDS = {"fault": "faults", "bad_input": "bad inputs"}
PACKAGES = ("torch", "numpy", "rich", "pytest", "hypothesis")


@dataclass(frozen=True)
class Case:
    """One test as pytest reported it.  inputs: how many bad inputs it tried; a fault is one."""

    name: str
    kind: str
    outcome: str
    inputs: int
    seconds: float


def cases_of(report: str) -> list[Case]:
    """The tests of pytest's JUnit report that plant a fault or hand over bad input."""
    found = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        if properties.get("kind") in KINDS:
            ends = {child.tag for child in case}
            outcome = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            name = f"{case.get('classname', '').split('.')[-1]}: {case.get('name')}"
            inputs = int(properties.get("inputs", 1))
            found.append(Case(name, properties["kind"], outcome, inputs, float(case.get("time", 0))))
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


def run_marked() -> list[Case]:
    """Run the marked tests, two at a time: most of them wait for processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marked.xml"
        which = ["-m", " or ".join(KINDS), "tests"]
        arguments = ["-q", "-n", "2", "--dist", "worksteal", f"--junitxml={path}", *which]
        subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
        return cases_of(path.read_text(encoding="utf-8"))


def sums(cases: list[Case], kind: str) -> dict[str, int]:
    """How many faults or inputs by outcome."""
    of_kind = [case for case in cases if case.kind == kind]
    return {end: sum(c.inputs for c in of_kind if c.outcome == end) for end in ("passed", "failed", "skipped")}


def summary(results: dict, versions: list[dict], mutated: dict) -> str:
    """The table of the README, from stored results alone."""
    lines = ["| what | result | date | command |", "|---|---|---|---|"]
    working = [entry for entry in versions if matrix.works(entry) == "yes"]
    if versions:
        last = max(entry["date"] for entry in versions)
        lines.append(f"| torch versions | {len(working)} of {len(CHECKED_ON)} work | {last} | `make matrix` |")
    if mutated:
        caught = sum(bool(entry["caught"]) for entry in mutated["tried"])
        line = f"| mutants of the library | {caught} of {len(mutated['tried'])} caught"
        lines.append(f"{line} | {mutated['date']} | `make mutants` |")
    for kind, words in (("fault", "faults survived"), ("bad_input", "bad inputs answered")):
        if results:
            counts = results["counts"][kind]
            tried = counts["passed"] + counts["failed"]
            line = f"| {words} | {counts['passed']:,} of {tried:,}"
            lines.append(f"{line} | {results['date']} | `make report` |")
    return "\n".join(lines)


def page(results: dict, versions: list[dict], mutated: dict) -> str:
    """The whole page, in Markdown."""
    lines = [f"# What actmem was put through, {results['date']}", "", summary(results, versions, mutated), ""]
    lines += ["## Versions", "", *(f"- {name} {number}" for name, number in results["versions"].items()), ""]
    for kind, title in KINDS.items():
        cases = [case for case in results["cases"] if case["kind"] == kind]
        lines += [f"## {title.capitalize()}", "", "| test | tried | outcome | s |", "|---|---:|---|---:|"]
        cells = ((case["name"].replace("|", "\\|"), case) for case in cases)
        lines += [
            f"| {name} | {case['inputs']:,} | {case['outcome']} | {case['seconds']:.1f} |" for name, case in cells
        ]
        lines.append("")
    lines += ["## Mutants", ""]
    if mutated:
        lines += [f"{mutated['date']}, torch {mutated['torch']}", "", "| change | caught by | s |", "|---|---|---:|"]
        for entry in mutated["tried"]:
            site = entry["site"].replace("|", "\\|")
            lines.append(f"| `{site}` | {entry['caught'] or '**nothing**'} | {entry['seconds']} |")
        lines += ["", "Left out, because no result can change here:", ""]
        lines += [f"- `{name}`: {why}" for name, why in mutants.LEFT_OUT.items()]
    lines += ["", "## Torch", "", matrix.table(versions), "", "## Times", ""]
    total = sum(case["seconds"] for case in results["cases"])
    lines.append(f"- the tests of faults and bad inputs: {total:.0f} s on {os.cpu_count()} cores, {results['date']}")
    return "\n".join([*lines, *tests_line(), ""])


def tests_line() -> list[str]:
    """How long the last `make test` here took, if there was one."""
    if not LAST_TESTS.exists():
        return []
    suites = list(ElementTree.parse(LAST_TESTS).iter("testsuite"))
    number = sum(int(suite.get("tests", 0)) for suite in suites)
    bad = sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)
    seconds, day = sum(float(s.get("time", 0)) for s in suites), suites[0].get("timestamp", "")[:10]
    return [f"- `make test`: {number:,} tests, {bad} failed, {seconds / 60:.1f} minutes, {day}"]


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def with_summary(readme: str, text: str) -> str:
    before, rest = readme.split(START)
    return f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}"


def stored() -> tuple[dict, list[dict], dict]:
    """The latest results of ``make report``, ``make matrix`` and ``make mutants``."""
    return read(RESULTS), matrix.read_results(), mutants.stored()


def main(arguments: list[str]) -> int:
    """Run, or read the report of a whole `make test` if its path is given, with how long each file took; store, write.

    Returns 1 if a fault or an input was not survived.
    """
    if arguments:
        text = Path(arguments[0]).read_text(encoding="utf-8")
        cases = cases_of(text)
        before = json.loads(DURATIONS.read_text(encoding="utf-8"))
        DURATIONS.write_text(json.dumps(durations(text, before), indent=1) + "\n", encoding="utf-8")
    else:
        cases = run_marked()
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "counts": {kind: sums(cases, kind) for kind in KINDS},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    found = stored()
    readme = matrix.README.read_text(encoding="utf-8")
    matrix.README.write_text(with_summary(readme, summary(*found)), encoding="utf-8")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page({**results, "cases": [asdict(case) for case in cases]}, *found[1:]), encoding="utf-8")
    print(f"{summary(*found)}\n\n{PAGE}")
    return int(any(counts["failed"] for counts in results["counts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
