"""``make matrix``: what it counts, and what it calls working."""

import pytest
from matrix import PARTS, counts, works

ALL_PASS = {part: {"passed": 3, "failed": 0, "skipped": 1} for part in PARTS}


def junit(**numbers):
    attributes = " ".join(f'{name}="{number}"' for name, number in numbers.items())
    return f"<testsuites><testsuite {attributes}></testsuite></testsuites>"


@pytest.mark.parametrize(
    ("report", "exit_code", "expected"),
    [
        (junit(tests=5, failures=0, errors=0, skipped=2), 0, (3, 0, 2)),
        (junit(tests=5, failures=1, errors=2, skipped=1), 1, (1, 3, 1)),
        (junit(tests=5, failures=0, errors=0, skipped=0), 139, (5, 1, 0)),  # ended by a signal after its last test
        (junit(tests=0, failures=0, errors=0, skipped=0), 5, (0, 1, 0)),  # no test was found
        ("", 4, (0, 1, 0)),
    ],
)
def test_counts(report, exit_code, expected):
    assert tuple(counts(report, exit_code).values()) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (ALL_PASS, "yes"),
        ({**ALL_PASS, "ledger": {"passed": 2, "failed": 1, "skipped": 0}}, "no: ledger"),
        ({**ALL_PASS, "pipeline": {"passed": 0, "failed": 0, "skipped": 4}}, "no: pipeline"),
        ({part: ALL_PASS[part] for part in list(PARTS)[1:]}, "no: formulas"),
        ({}, "not installed"),
    ],
)
def test_a_part_that_failed_was_skipped_or_never_ran_does_not_work(parts, expected):
    assert works({"build": "2.0.0+cpu" if parts else "", "parts": parts}) == expected
