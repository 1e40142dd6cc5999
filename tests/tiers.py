"""The tiers of the tests, and which of a function's many cases run by day.

``make test FAST=1`` leaves out tests that take seconds (``slow``), ``make test`` one more case of what it has
(``nightly``) and of a function marked ``by_day(n)`` all cases but n, one with FAST=1; ``make test-all`` nothing.
Each run says how many it left out.
"""

import os
import random
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import settings

ALL, FAST = os.environ.get("ALL") == "1", os.environ.get("FAST") == "1"
LEFT_OUT = () if ALL else ("nightly", "slow") if FAST else ("nightly",)
#: Folders in which every test starts programs, a browser or a lab on ranks; so do tests that use ``pools``.
SLOW = tuple(
    f"tests/{folder}/" for folder in ("lab_tools", "labs", "notebooks", "right_answers", "verify", "wrong_answers")
)
_left_out = pytest.StashKey[Counter]()


def pytest_collection_modifyitems(config, items):
    """Leave out the later tiers, unless tests are named; put what starts programs first."""
    items.sort(key=lambda item: not item.nodeid.startswith((*SLOW, "notebooks/")))
    for item in items:
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
        if item.get_closest_marker("by_day"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        number = 1 if FAST else cases[0].get_closest_marker("by_day").args[0]
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
