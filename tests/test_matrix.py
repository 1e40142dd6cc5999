"""The table of torch versions: what it counts as working, and that the README shows the latest run."""

import pytest

from actmem.torch_private import CHECKED_ON
from tests import matrix
from tests.matrix import PARTS, README, ROOT, counts, read_results, table, with_table, works

PASSING = {"torch": "2.0.0", "build": "2.0.0+cpu", "python": "3.11.2", "date": "2026-01-01"}
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
    ],
)
def test_a_part_that_failed_was_skipped_or_never_ran_does_not_work(parts, expected):
    assert works({**PASSING, "parts": parts}) == expected


def test_a_version_that_could_not_be_installed_does_not_work():
    assert works({**PASSING, "build": "", "parts": {}}) == "not installed"


def test_the_table_adds_up_the_parts():
    row = table([{**PASSING, "parts": ALL_PASS}]).splitlines()[-1]
    assert row == f"| 2.0.0+cpu | 3.11.2 | yes | {3 * len(PARTS)} | 0 | {len(PARTS)} | 2026-01-01 |"


def test_every_part_names_files_that_exist():
    assert [path for paths in PARTS.values() for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("argument", ["1.0.0", f"{CHECKED_ON[0]}@2.6"])
def test_a_version_or_a_python_that_is_not_there_is_refused(argument, capsys):
    assert matrix.main([argument]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert argument in line


def test_the_readme_shows_the_latest_run_and_every_version_in_it_works():
    results = read_results()
    assert {entry["torch"] for entry in results} <= set(CHECKED_ON)
    assert [entry["torch"] for entry in results if works(entry) != "yes"] == []
    readme = README.read_text(encoding="utf-8")
    assert with_table(readme, results) == readme
