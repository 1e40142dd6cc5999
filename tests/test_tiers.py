"""What each tier runs, and what `make test` keeps of many cases."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from tests.tiers import at_night, covering, sampled


def by_day(cases):
    return [case for case in cases if not getattr(case, "marks", ())]


def values(cases):
    return [getattr(case, "values", case) for case in cases]


def test_pairs_keep_every_two_values_together():
    axes = ("abcd", (1, 2, 3), (True, False), "xy")
    cases = covering(*axes)
    assert len(set(values(cases))) == 48 and 12 <= len(by_day(cases)) < 18
    for one, other in combinations(range(4), 2):
        kept = {(case[one], case[other]) for case in by_day(cases)}
        assert kept == {(x, y) for x in axes[one] for y in axes[other]}
    assert len(by_day(covering(*axes, of=1))) == 4


def test_a_sample_is_the_same_every_time():
    cases = sampled(range(100), 10, always=[7, 8])
    assert len(by_day(cases)) in (10, 11, 12) and {7, 8} <= set(by_day(cases))
    assert by_day(sampled(range(100), 10, always=[7, 8])) == by_day(cases)
    assert len(by_day(sampled(range(3), 10))) == 3


def test_marks_and_names_stay():
    case = at_night(pytest.param(1, marks=pytest.mark.slow, id="one"))
    assert [mark.name for mark in case.marks] == ["slow", "nightly"] and case.id == "one" and case.values == (1,)


TIERS = """
import pytest

def test_one():
    pass

@pytest.mark.slow
def test_two():
    pass

@pytest.mark.nightly
@pytest.mark.parametrize("n", range(3))
def test_three(n):
    pass

@pytest.mark.by_day(4)
@pytest.mark.parametrize("n", range(40))
def test_long(n):
    pass
"""


@pytest.mark.parametrize(
    ("tier", "arguments", "said"),
    [
        ("FAST", ["."], ["42 tests of the nightly tier not run", "1 tests of the slow tier not run", "2 passed"]),
        ("NONE", [".", "-p", "xdist", "-n", "1"], ["39 tests of the nightly tier not run", "6 passed"]),
        ("ALL", ["."], ["45 passed"]),
        ("NONE", [".", "-m", "nightly"], ["3 passed"]),
        ("FAST", ["test_tiers.py::test_two"], ["1 passed"]),  # what is named is run
    ],
)
def test_a_tier_says_what_it_leaves_out(tier, arguments, said, tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.tiers import *\n", encoding="utf-8")
    (tmp_path / "test_tiers.py").write_text(TIERS, encoding="utf-8")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    environment = {**os.environ, "FAST": "", "ALL": "", tier: "1", **alone}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition(",")[0].partition(" in ")[0] for line in done.stdout.splitlines()]
    assert [line for line in lines if "not run" in line or "passed" in line] == said
