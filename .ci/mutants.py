"""Break the library in 80 ways and list those that no test catches: ``make mutants``, not in CI.

Each mutant is one change from ``.ci/mutation_rules.py`` in a copy of the repository.  The tests near the
changed file run on it, cheap ones first, until one fails.  Near: the file's own tests, then those that
import it, then those that import what imports it.  A test that fails has to pass on the unchanged code.
Every run is a fork of one process that has torch loaded, and so are the ranks that tests start.
Results go to .ci/mutants.json, and as they come to build/mutants.json: ``--new`` takes those that are
there, of files that are still the same.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from mutation_rules import Site, chosen, package_sites

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "actmem"
RESULTS = ROOT / ".ci" / "mutants.json"
LATEST = ROOT / "build" / "mutants.json"
SEED = 2205
#: What the copy needs to run tests.
COPIED = ("src", "tests", "labs", "notebooks/source", "pyproject.toml", "constraints.txt", "README.md", "Makefile")
#: Folders of tests that may be near.  Not those that start labs, notebooks or browsers: too slow for 80 runs.
NEARBY = (
    "",
    "formulas",
    "measure",
    "layers",
    "parallel",
    "plan",
    "verify",
    "tape",
    "others",
    "bench",
    "show",
    "bench/peers",
    "bench/reproduce",
)
#: Tests of the repository, not of the library.
APART = {"test_ci_tools", "test_imports", "test_names", "test_project_files", "test_setup", "test_tiers", "test_torch_private"}  # fmt: skip
#: What a test file costs if its text has one of these words; 1 without any.
COSTS = {"torch": 2, "pools": 6, "subprocess": 12, "launch": 12, "reproduce": 12, "torch.compile": 20, "memory_peak": 6}
#: Farther tests than this many imports are not near.
FARTHEST = 4
#: Seconds after which a single test counts as one that never ends, and the tests of one mutant end without a result.
NEVER_ENDS, LIMIT = 900, 3600
#: Where conftest.py can't be loaded, no test is there to be named.
NO_TEST = "pytest ended with"
#: How the names of changes begin that leave every result as it is, or that only a GPU can tell: why.
LEFT_OUT: dict[str, str] = {
    "measure/tools.py: settled: boundary moved: time.monotonic()": "waits as long",
    "parallel/rng.py: _draw_in_one_pass": "runs on a GPU",
    "parallel/rng.py: _drop: other dtype": "the same product, slower",
}


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("actmem"):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def distances(module: str) -> dict[str, int]:
    """How many imports lie between a module and each module of src that needs it."""
    used_by: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in imports(path):
            used_by.setdefault(name, set()).add(module_name(path))
    found, ring = {module: 0}, {module}
    while ring:
        ring = {user for one in ring for user in used_by.get(one, ())} - found.keys()
        found |= dict.fromkeys(ring, max(found.values()) + 1)
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def near_tests(changed: str) -> list[str]:
    """The test files to run on a change of this file of the package: near and cheap ones first."""
    needing, order = distances(module_name(PACKAGE / changed)), []
    for path in sorted(path for folder in NEARBY for path in (ROOT / "tests" / folder).glob("test_*.py")):
        mirrored = path.relative_to(ROOT / "tests") == Path(changed).parent / f"test_{Path(changed).name}"
        between = min((needing[name] + 1 for name in imports(path) if name in needing), default=FARTHEST + 1)
        text = path.read_text(encoding="utf-8")
        mirrored |= changed == "__main__.py" and '"-m", "actmem"' in text
        if path.stem not in APART and (mirrored or between <= FARTHEST):
            cost = max([1, *(cost for word, cost in COSTS.items() if word in text)])
            order.append((0 if mirrored else between * cost, str(path.relative_to(ROOT))))
    return [test for _, test in sorted(order)]


def make_copy(folder: Path) -> Path:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


@dataclass
class Run:
    """Tests that run in a copy.  site: the change there; None where they check the unchanged code."""

    copy: Path
    tests: list[str]
    site: Site | None
    number: int = 0
    start: float = 0.0

    def begin(self) -> None:
        """Change the copy and fork."""
        if self.site:
            file = self.copy / "src" / "actmem" / self.site.path
            self.original = file.read_bytes()
            file.write_bytes(self.site.applied(self.original))
        (self.copy / "stopped").write_text("")
        (self.copy / "running").write_text("nothing")
        self.start = time.monotonic()
        assert self.tests, f"no test is near {self.site}"  # pytest would run all there are
        self.number = os.fork()
        if self.number == 0:
            try:
                _be_pytest(self.copy, self.tests)
            except BaseException:
                (self.copy / "stopped").write_text(traceback.format_exc())
            finally:
                os._exit(0)

    def ended(self) -> bool:
        """Whether it has; ends it where a test never does."""
        if os.waitpid(self.number, os.WNOHANG) == (0, 0):
            running = self.copy / "running"
            endless = time.time() - running.stat().st_mtime > NEVER_ENDS
            if not endless and time.monotonic() - self.start < LIMIT:
                return False
            if endless:
                (self.copy / "stopped").write_text(f"{running.read_text()} (it never ended)")
            os.killpg(self.number, signal.SIGKILL)
            os.waitpid(self.number, 0)
        if self.site:
            (self.copy / "src" / "actmem" / self.site.path).write_bytes(self.original)
        self.seconds = time.monotonic() - self.start
        self.stopped = (self.copy / "stopped").read_text()
        return True


class _Notes:
    """A plugin of pytest that notes the running test, and the first that fails or can't be loaded."""

    def __init__(self, copy: Path):
        self.copy = copy
        self.name = ""

    def pytest_runtest_logstart(self, nodeid) -> None:
        (self.copy / "running").write_text(nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.name = self.name or report.nodeid


def _be_pytest(copy: Path, tests: list[str]) -> None:
    os.setsid()
    output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    sys.path[:] = [str(copy / "src"), str(copy), *(p for p in sys.path if p and not p.startswith(str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "actmem", "actmem_course")]:
        del sys.modules[name]
    os.environ.update(PYTHONPATH=str(copy / "src"), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    # The pools' ranks: a fork has torch already.
    setattr(torch.multiprocessing, "get_context", lambda method=None: multiprocessing.get_context("fork"))  # noqa: B010
    import pytest

    notes = _Notes(copy)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[notes])
    (copy / "stopped").write_text(notes.name or ("" if code == 0 else f"{NO_TEST} {int(code)}"))
    os.killpg(0, signal.SIGKILL)  # ranks and all


def all_run(runs: Iterator[Run], jobs: int) -> Iterator[Run]:
    """Every run, ended, ``jobs`` at a time: ``runs`` takes a copy when it is asked for the next."""
    going: list[Run] = []
    for run in runs:
        run.begin()
        going.append(run)
        while len(going) == jobs:
            yield from _ended(going)
    while going:
        yield from _ended(going)


def _ended(going: list[Run]) -> Iterator[Run]:
    time.sleep(0.1)
    for run in [run for run in going if run.ended()]:
        going.remove(run)
        yield run


def fingerprint(site: Site) -> str:
    """Of the file that a site is in, as it is now."""
    return hashlib.sha256((PACKAGE / site.path).read_bytes()).hexdigest()[:16]


def entry_of(run: Run, site: Site) -> dict[str, Any]:
    """What is stored of one mutant: caught is the test that failed, "" if none did."""
    entry = {"site": site.name, "caught": run.stopped, "seconds": round(run.seconds), "file": fingerprint(site)}
    return {**entry, "date": date.today().isoformat()}


def stored() -> dict[str, Any]:
    """The latest results; nothing before the first run."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=SEED, help="another choice of 80; only the default one is stored")
    parser.add_argument("--only", default="", help="of all sites there are, those with this in their name")
    parser.add_argument("--new", action="store_true", help="only what the latest results have not caught")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    sites = [site for site in package_sites(PACKAGE) if not site.name.startswith(tuple(LEFT_OUT))]
    sites = [site for site in sites if options.only in site.name] if options.only else chosen(sites, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        copies = [make_copy(Path(folder) / str(number)) for number in range(options.jobs)]
        planned = [(site, near_tests(site.path)) for site in sites]  # now: the repository may change meanwhile
        tried: list[dict[str, Any]] = []
        if options.new and LATEST.exists():
            files = {site.name: fingerprint(site) for site in sites}
            latest = json.loads(LATEST.read_text(encoding="utf-8"))
            tried = [entry for entry in latest if entry["caught"] and files.get(entry["site"]) == entry["file"]]
            done = {entry["site"] for entry in tried}
            planned = [(site, tests) for site, tests in planned if site.name not in done]
        for run in all_run((Run(copies.pop(), tests, site) for site, tests in planned), options.jobs):
            copies.append(run.copy)
            assert run.site
            tried.append(entry_of(run, run.site))
            if not options.only:
                LATEST.parent.mkdir(exist_ok=True)
                LATEST.write_text(json.dumps(tried, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"{run.seconds:4.0f} s  {run.site.name[:150]}\n        {run.stopped or 'MISSED'}", flush=True)
        catching = sorted({entry["caught"].removesuffix(" (it never ended)") for entry in tried} - {""})
        catching = [test for test in catching if not test.startswith(NO_TEST)]
        # All in one run; where one fails, again without it.
        while catching and (run := next(all_run(iter([Run(copies[0], catching, None)]), 1))).stopped:
            print(f"fails without any change, so it catches nothing: {run.stopped}", flush=True)
            for entry in tried:
                entry["caught"] = "" if entry["caught"].startswith(run.stopped) else entry["caught"]
            catching = [test for test in catching if not run.stopped.startswith((test, NO_TEST))]
    missed = [entry["site"] for entry in tried if not entry["caught"]]
    print(f"{len(tried) - len(missed)} of {len(tried)} caught; missed:\n" + "\n".join(missed or ["none"]))
    if options.seed == SEED and not options.only:
        tried.sort(key=lambda entry: entry["site"])
        found = {"date": date.today().isoformat(), "torch": torch.__version__, "tried": tried}
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(len(missed) > len(tried) // 20)


if __name__ == "__main__":
    sys.exit(main())
