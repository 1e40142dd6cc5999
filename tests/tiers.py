"""The tiers of the tests, and the order in which the test processes take them.

``make test FAST=1`` leaves out tests that take seconds (``slow``), ``make test`` one more case of what it has
(``nightly``) and of each function the cases that would take it beyond ``SECONDS_BY_DAY``, ``make test-all`` nothing.
Each run says how many it left out.
"""

import json
import os
import random
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import settings

ALL, FAST = os.environ.get("ALL") == "1", os.environ.get("FAST") == "1"
LEFT_OUT = () if ALL else ("nightly", "slow") if FAST else ("nightly",)
#: Folders in which every test starts programs, a browser or a lab on ranks; so do tests that use ``pools``.
SLOW = tuple(
    f"tests/{folder}/"
    for folder in ("lab_tools", "labs", "notebooks", "peers", "right_answers", "verify", "wrong_answers")
)
#: What one function's cases may take together in ``make test``, and with FAST=1; one case always runs.
SECONDS_BY_DAY = 0.5 if FAST else 2.0
#: Folders each of whose cases is an answer of its own: all run by day.
WHOLE = ("tests/right_answers/", "tests/wrong_answers/")
#: Seconds of each file, and of a case of each function that takes long, in the run that ``make report`` stored last.
_STORED = Path(__file__).with_name("durations.json")
SECONDS = json.loads(_STORED.read_text(encoding="utf-8")) if _STORED.exists() else {}


def _seconds(file):
    return SECONDS.get(file, 60.0 if file.startswith((*SLOW, "notebooks/")) else 0.0)


_left_out = pytest.StashKey[Counter]()


def pytest_collection_modifyitems(config, items):
    """Leave out the later tiers, unless tests are named; put the longest first; note what ``make report`` counts."""
    items.sort(key=lambda item: -_seconds(item.nodeid.partition("::")[0]))
    for item in items:
        item.user_properties += [("kind", kind) for kind in ("fault", "bad_input") if item.get_closest_marker(kind)]
        if item.nodeid.startswith(SLOW) or "pools" in getattr(item, "fixturenames", ()):  # a notebook's cell has none
            item.add_marker("slow")
    if config.option.markexpr or all("::" in argument for argument in config.args):
        return
    too_many = () if ALL else _beyond_the_day([item for item in items if not item.get_closest_marker("nightly")])
    for item in too_many:
        item.add_marker("nightly")
    tiers = [next((tier for tier in LEFT_OUT if item.get_closest_marker(tier)), "") for item in items]
    config.stash[_left_out] = Counter(tier for tier in tiers if tier)
    config.hook.pytest_deselected(items=[item for item, tier in zip(items, tiers) if tier])
    items[:] = [item for item, tier in zip(items, tiers) if not tier]


def _beyond_the_day(items):
    """The cases of functions that would take too long together; which ones is the same in every run."""
    functions = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        sampled_by_day = name in SECONDS and not name.startswith(WHOLE)
        number = max(1, int(SECONDS_BY_DAY / SECONDS[name])) if sampled_by_day else len(cases)
        if number < len(cases):
            yield from random.Random(name).sample(cases, len(cases) - number)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist: only they collect
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(_left_out, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[_left_out] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config):
    for tier, number in sorted(config.stash.get(_left_out, {}).items()):
        terminalreporter.write_line(f"{number:,} tests of the {tier} tier not run")


def at_night(case):
    """A case for ``parametrize`` that only ``make test-all`` runs; it may be marked already."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.nightly], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)


def sampled(cases, number, always=()):
    """All ``cases``; in ``make test`` only ``number`` of them, the same ones every time, and those of ``always``."""
    cases = list(cases)
    chosen = set(random.Random(len(cases)).sample(range(len(cases)), min(number, len(cases))))
    assert all(case in cases for case in always), "always names a case that is none"
    return [case if which in chosen or case in always else at_night(case) for which, case in enumerate(cases)]


def covering(*axes, of=2):
    """The product of ``axes``; in ``make test`` only as many of it as have every ``of`` values of as many axes together."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    parts: dict[tuple, set] = {case: set(combinations(enumerate(case), of)) for case in cases}
    missing, chosen = set().union(*parts.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(parts[case] & missing))
        chosen.add(best)
        missing -= parts[best]
    made = [(case, tuple(list(axis)[which] for axis, which in zip(axes, case))) for case in cases]
    return [values if case in chosen else at_night(values) for case, values in made]


def examples(number, at_night):
    """Settings for a property: so many examples in ``make test``, and in ``make test-all``."""
    return settings(max_examples=at_night if ALL else number, deadline=None)
