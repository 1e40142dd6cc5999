"""Run the library's tests on every version of torch that actmem says it works on.

CI does not run this: ``make matrix`` does.

Each version gets a virtual environment of its own in build/matrix, some gigabytes where pip brings a
CUDA build, and it is deleted after the run unless KEEP=1.  Results go to .ci/torch_versions.json, and as a table to
FINDINGS.md.
``2.9.1@3.10`` tests one version on another Python, ``python3.10`` by name.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from actmem.torch_private import CHECKED_ON

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
RESULTS = ROOT / ".ci" / "torch_versions.json"
FINDINGS = ROOT / "FINDINGS.md"
MARKS = "<!-- make matrix writes from here -->\n", "<!-- make matrix writes to here -->"
#: What runs on each version: a part passes if some of its tests pass and none fails.
PARTS = {
    "formulas": ["tests/formulas", "tests/test_schedule.py"],
    "layer": ["tests/layers", "tests/parallel", "tests/test_recompute.py", "tests/test_drop.py"],
    "ledger": [
        "tests/measure/test_ledger.py",
        "tests/measure/test_table2_exact.py",
        "tests/lab_tools/test_held_bytes.py",
    ],
    "emulation": [
        "tests/measure/test_emulate.py",
        "tests/measure/test_gpu_kernels.py",  # against fake CUDA tensors where torch is a CUDA build
    ],
    "pipeline": [
        "tests/test_pipeline.py",
        "tests/labs/test_measure_pipeline.py",
    ],
    "main job": ["tests/labs/test_measure_table2.py"],
}
#: What the tests above need beside torch, in the versions of constraints.txt.
PACKAGES = ("numpy", "rich", "plotly", "pytest", "pytest-xdist", "hypothesis")
FREE_BYTES = 12 << 30


def main(arguments: list[str]) -> int:
    """Test the versions named, or all.

    Returns: 1 if something failed, 2 for a version or a Python that is not there.
    """
    wanted = [argument.partition("@")[::2] for argument in arguments or CHECKED_ON]
    for version, python in wanted:
        if version not in CHECKED_ON:
            print(f"{version}: not in torch_private.CHECKED_ON", file=sys.stderr)
            return 2
        if python and not shutil.which(f"python{python}"):
            print(f"{version}@{python}: no python{python} on the PATH", file=sys.stderr)
            return 2
    found = {entry["torch"]: entry for entry in read_results()}
    for version, python in wanted:
        print(f"torch {version}", flush=True)
        found_python = shutil.which(f"python{python}") if python else None  # it was looked for above
        found[version] = check_version(version, found_python or sys.executable)
        entries = [found[v] for v in CHECKED_ON if v in found]
        RESULTS.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        write_table(table(entries))
        print(table(entries), flush=True)
    return int(any(works(found[version]) != "yes" for version, _ in wanted))


def check_version(version: str, base_python: str) -> dict:
    """Install one version, run all parts on it, delete it."""
    entry: dict[str, Any] = {"torch": version, "build": "", "python": "", "date": date.today().isoformat(), "parts": {}}
    folder = FOLDER / f"{version}-{Path(base_python).name}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(FOLDER).free < FREE_BYTES:
        print(f"less than {FREE_BYTES >> 30} GiB free: not installed", file=sys.stderr)
        return entry
    try:
        python = install(version, folder, base_python)
        says = "import platform, torch; print(torch.__version__, platform.python_version())"
        entry["build"], entry["python"] = run(python, "-c", says, check=True, stdout=subprocess.PIPE).stdout.split()
        for part, paths in PARTS.items():
            entry["parts"][part] = run_part(python, paths)
            print(f"  {part}: {entry['parts'][part]}", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"{version}: {' '.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
    finally:
        if os.environ.get("KEEP") != "1":
            shutil.rmtree(folder, ignore_errors=True)
    return entry


def install(version: str, folder: Path, base_python: str) -> Path:
    """A virtual environment with one version of torch; its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([base_python, "-m", "venv", folder], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    run(python, "-m", "pip", "install", "-q", "-c", constraints, f"torch=={version}", *PACKAGES, check=True)
    return python


def run_part(python: Path, paths: list[str]) -> dict[str, int]:
    """How many tests of ``paths`` passed, failed (errors included) and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = run(python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", f"--junitxml={report}", *paths)
        return counts(report.read_text() if report.exists() else "", done.returncode)


def counts(report: str, exit_code: int) -> dict[str, int]:
    """Read pytest's JUnit report.  A run that ended badly without a failed test counts as one failure."""
    suites = ElementTree.fromstring(report).iter("testsuite") if report else []
    total, failed, skipped = 0, 0, 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    if exit_code and not failed:
        total, failed = total + 1, 1
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def run(*command, check: bool = False, **options) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",  # tests start torchrun by name
    }
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, check=check, text=True, **options)


def works(entry: dict) -> str:
    """ "yes", or what does not: a part that ran no test is not one that passed."""
    parts = entry["parts"]
    bad = [part for part in PARTS if not parts.get(part, {}).get("passed") or parts[part]["failed"]]
    return "yes" if not bad else "not installed" if not entry["build"] else "no: " + ", ".join(bad)


def table(entries: list[dict]) -> str:
    """The results as a table of Markdown."""
    lines = ["| torch | Python | works | passed | failed | skipped | date |", "|---|---|---|---:|---:|---:|---|"]
    for entry in entries:
        sums = [sum(part[kind] for part in entry["parts"].values()) for kind in ("passed", "failed", "skipped")]
        cells = [entry["build"] or entry["torch"], entry["python"], works(entry), *sums, entry["date"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write_table(lines: str) -> None:
    """Put the table between its marks in FINDINGS.md."""
    before, rest = FINDINGS.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    FINDINGS.write_text(f"{before}{MARKS[0]}{lines}\n{MARKS[1]}{after}", encoding="utf-8")


def read_results() -> list[dict]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
