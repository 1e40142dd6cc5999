"""Break the library in 80 ways and list those that no test catches: ``make mutants``, not in CI.

Each mutant is one change from ``.ci/mutation_rules.py`` in a copy of the repository.  The tests near the
changed file run on it, cheap ones first, until one fails.  Near: the file's own tests, then those that
import it, then those that import what imports it.  A test that fails has to pass on the unchanged code.
Results go to .ci/mutants.json, and as they come to build/mutants.json: ``--new`` takes those that are
there, of files that are still the same.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from mutation_rules import Site, chosen, package_sites

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "actmem"
RESULTS = ROOT / ".ci" / "mutants.json"
LATEST = ROOT / "build" / "mutants.json"
SEED = 2205
#: What the copy needs to run tests.
COPIED = (
    "src",
    "tests",
    "labs",
    "notebooks/source",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "FINDINGS.md",
    "Makefile",
)
#: Folders of tests that may be near.  Not those that start labs, notebooks or browsers: too slow for 80 runs.
NEARBY = ("", "formulas", "measure", "layers", "parallel", "plan", "verify", "tape", "others", "bench", "show", "bench/peers")  # fmt: skip
#: Tests of the repository, not of the library.
APART = {"test_ci_tools", "test_imports", "test_setup", "test_tiers"}
#: What a test file costs if its text has one of these words; 1 without any.
COSTS = {"torch": 2, "pools": 6, "subprocess": 12, "launch": 12, "reproduce": 12, "torch.compile": 20, "memory_peak": 6}
#: Farther tests than this many imports are not near.
FARTHEST = 4
#: Seconds after which the tests of one mutant count as caught: they take minutes.
LIMIT, NEVER_ENDED = 3600, "the tests never ended"
#: Where conftest.py can't be loaded, no test is there to be named.
NO_TEST = "pytest ended with"
#: How the names of changes begin that leave every result as it is, or that only a GPU can tell: why.
LEFT_OUT: dict[str, str] = {
    "ledger/tools.py: settled: boundary moved: time.monotonic()": "waits as long",
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
        mirrored |= changed == "__main__.py" and '"-m", "actmem_tools"' in text
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


def tried_on(copy: Path, tests: list[str], site: Site) -> dict[str, Any]:
    """Change the copy, run the tests on it, change it back.  caught: the test that failed, "" if none did."""
    file = copy / "src" / "actmem" / site.path
    original, start = file.read_bytes(), time.monotonic()
    file.write_bytes(site.applied(original))
    try:
        caught = first_failure(copy, tests)
    finally:
        file.write_bytes(original)
    seconds = round(time.monotonic() - start)
    print(f"{seconds:4.0f} s  {site.name[:150]}\n        {caught or 'MISSED'}", flush=True)
    entry = {"site": site.name, "caught": caught, "seconds": seconds, "file": fingerprint(site)}
    return {**entry, "date": date.today().isoformat()}


def first_failure(copy: Path, tests: list[str]) -> str:
    """The first test that fails there, or can't be loaded; "" if none does."""
    assert tests, "pytest would run all there are"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-xq",
        "--tb=no",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *tests,
    ]
    own = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return NEVER_ENDED
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks and all
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else "" if process.returncode == 0 else f"{NO_TEST} {process.returncode}"


def fingerprint(site: Site) -> str:
    """Of the file that a site is in, as it is now."""
    return hashlib.sha256((PACKAGE / site.path).read_bytes()).hexdigest()[:16]


def stored() -> dict[str, Any]:
    """The latest results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=SEED, help="another choice of 80; only the default one is stored")
    parser.add_argument("--only", default="", help="of all sites there are, those with this in their name")
    parser.add_argument("--new", action="store_true", help="only what the latest results have not caught")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    sites = [site for site in package_sites(PACKAGE) if not site.name.startswith(tuple(LEFT_OUT))]
    sites = [site for site in sites if options.only in site.name] if options.only else chosen(sites, options.seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as workers:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copies.put(make_copy(Path(folder) / str(number)))
        planned = [(site, near_tests(site.path)) for site in sites]  # now: the repository may change meanwhile
        tried: list[dict[str, Any]] = []
        if options.new and LATEST.exists():
            files = {site.name: fingerprint(site) for site in sites}
            latest = json.loads(LATEST.read_text(encoding="utf-8"))
            tried = [entry for entry in latest if entry["caught"] and files.get(entry["site"]) == entry["file"]]
            done = {entry["site"] for entry in tried}
            planned = [(site, tests) for site, tests in planned if site.name not in done]

        def tried_on_one(plan: tuple[Site, list[str]]) -> dict[str, Any]:
            site, tests = plan
            copy = copies.get()
            try:
                return tried_on(copy, tests, site)
            finally:
                copies.put(copy)

        for entry in workers.map(tried_on_one, planned):
            tried.append(entry)
            if not options.only:
                LATEST.parent.mkdir(exist_ok=True)
                LATEST.write_text(json.dumps(tried, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        catching = {entry["caught"] for entry in tried if "::" in entry["caught"]}
        # All in one run; where one fails, again without it.
        while catching and (wrong := first_failure(copies.queue[0], sorted(catching))):
            print(f"fails without any change, so it catches nothing: {wrong}", flush=True)
            for entry in tried:
                entry["caught"] = "" if entry["caught"] == wrong else entry["caught"]
            catching = catching - {wrong} if wrong in catching else set()
    missed = [entry["site"] for entry in tried if not entry["caught"]]
    print(f"{len(tried) - len(missed)} of {len(tried)} caught; missed:\n" + "\n".join(missed or ["none"]))
    if options.seed == SEED and not options.only:
        tried.sort(key=lambda entry: entry["site"])
        found = {"date": date.today().isoformat(), "torch": torch.__version__, "tried": tried}
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(len(missed) > len(tried) // 20)


if __name__ == "__main__":
    sys.exit(main())
