"""The programs in .ci: what they count, break and write, and that FINDINGS.md shows what is stored."""

import matrix
import mutants
import pytest
from matrix import FINDINGS, PARTS, ROOT, counts, read_results, table, with_table, works
from mutation_rules import ALWAYS, RULES, chosen, package_sites, sites_of
from report import counts_of, durations, stored, summary, with_summary

from actmem.torch_private import CHECKED_ON

# make matrix

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
        ({}, "not installed"),
    ],
)
def test_a_part_that_failed_was_skipped_or_never_ran_does_not_work(parts, expected):
    assert works({**PASSING, **({} if parts else {"build": ""}), "parts": parts}) == expected
    if parts == ALL_PASS:
        sums = f"{3 * len(PARTS)} | 0 | {len(PARTS)}"
        assert table([{**PASSING, "parts": parts}]).endswith(f"| 2.0.0+cpu | 3.11.2 | yes | {sums} | 2026-01-01 |")


def test_every_part_names_files_that_exist():
    assert [path for paths in PARTS.values() for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("argument", ["1.0.0", f"{CHECKED_ON[0]}@2.6"])
def test_a_version_or_a_python_that_is_not_there_is_refused(argument, capsys):
    assert matrix.main([argument]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert argument in line


# make report

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.labs.test_a" name="one[2]" time="1.5"><properties><property name="kind" value="fault"/></properties></testcase>
<testcase classname="tests.labs.test_a" name="two" time="2"><properties><property name="kind" value="fault"/></properties><failure/></testcase>
<testcase classname="tests.labs.test_a" name="root" time="0"><properties><property name="kind" value="fault"/></properties><skipped/></testcase>
<testcase classname="tests.test_b" name="many" time="3"><properties><property name="kind" value="bad_input"/><property name="inputs" value="600"/></properties></testcase>
<testcase classname="tests.test_c" name="else" time="3"/>
</testsuite></testsuites>"""


def test_faults_and_inputs_are_counted_by_what_became_of_them_and_the_summary_hides_none():
    counts = counts_of(JUNIT)
    assert counts["fault"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert counts["bad_input"] == {"passed": 600, "failed": 0, "skipped": 0}
    broken = [{"torch": CHECKED_ON[0], "build": "x", "python": "3", "date": "2026-01-02", "parts": {}}]
    mutated = {"date": "2026-01-03", "torch": "2", "tried": [{"site": "a", "caught": "", "seconds": 1}]}
    assert summary({"date": "2026-01-01", "counts": counts}, broken, mutated).splitlines()[2:] == [
        f"| torch versions | 0 of {len(CHECKED_ON)} work | 2026-01-02 | `make matrix` |",
        "| mutants of the library | 0 of 1 caught | 2026-01-03 | `make mutants` |",
        "| faults survived | 1 of 2 | 2026-01-01 | `make report` |",
        "| bad inputs answered | 600 of 600 | 2026-01-01 | `make report` |",
    ]


def test_seconds_are_kept_by_file_and_by_a_case_of_what_takes_long():
    def case(file, name, seconds):
        return f'<testcase file="tests/{file}.py" name="{name}" time="{seconds}"/>'

    cases = [case("a", "f[1]", 9), case("a", "f[2]", 2), case("a", "f[3]", 3), case("a", "g", 8), case("b", "h[1]", 5)]
    before = {"tests/b.py": 1, "tests/b.py::h": 0.5, "tests/b.py::gone": 1}
    assert durations(f"<testsuite>{''.join(cases)}</testsuite>", before) == {
        "tests/a.py": 22, "tests/b.py": 5, "tests/a.py::f": 2.5, "tests/b.py::h": 0.5
    }  # fmt: skip


def test_the_findings_show_the_stored_results_and_nothing_was_too_much():
    findings = FINDINGS.read_text(encoding="utf-8")
    assert with_table(with_summary(findings, summary(*stored())), read_results()) == findings
    assert [entry["torch"] for entry in read_results() if works(entry) != "yes"] == []
    assert [kind for kind, ends in stored()[0]["counts"].items() if ends["failed"]] == []
    tried = mutants.stored()["tried"]
    assert len(tried) == 80 and sum(not entry["caught"] for entry in tried) <= 4


# make mutants

SITES = package_sites(mutants.PACKAGE)
CODE = b"""
def product(x, tp, *, seed: int = 3):
    \"\"\"1 + 2 is left alone.\"\"\"
    for each in range(len(x) - 1):
        if x.size < 4 and tp:
            x.check(each)
    if tp.low == tp.high:
        raise ValueError("a" + "b")
    return all_reduce(f"{x + 1}" if tp.low else (2 * x.mul_(tp) + x.sum(dtype=torch.int32)) // tp.size, tp)
"""
MADE = {
    "collective dropped": {"(f'{x + 1}' if tp.low else (2 * x.mul_(tp) + x.sum(dtype=torch.int32)) // tp.size)"},
    "twins swapped": {"(tp.high)", "(tp.low)"},
    "other dtype": {"(torch.int64)"},
    "sign flipped": {"(len(x) + 1)", "(2 * x.mul_(tp) - x.sum(dtype=torch.int32))"},
    "term dropped": {"(len(x))", "(2 * x.mul_(tp))"},
    "factor dropped": {"(2)"},
    "divisor dropped": {"(2 * x.mul_(tp) + x.sum(dtype=torch.int32))"},
    "off by one": {"(2)", "(3)", "(4)", "(5)"},
    "boundary moved": {"(x.size <= 4)", "(tp.low != tp.high)"},
    "condition turned": {
        "(x.size < 4 or tp)",
        "((2 * x.mul_(tp) + x.sum(dtype=torch.int32)) // tp.size if tp.low else f'{x + 1}')",
    },
    "branch never taken": {"(False)"},
    "step skipped": {"(x)"},
    "call dropped": {"pass"},
}


def test_what_each_rule_makes_of_a_function():
    found = {rule: {site.after for site in sites_of("a.py", CODE) if site.rule == rule} for rule in RULES}
    assert found == MADE


def test_eighty_are_chosen_and_those_that_are_always_tried_among_them():
    found = chosen(SITES, mutants.SEED)
    assert len({(site.path, site.start, site.rule, site.after) for site in found}) == 80
    assert set(ALWAYS) <= {(site.path, site.owner, site.rule) for site in found}
    assert len({site.path for site in found}) > 35


def test_what_is_left_out_is_there():
    assert [name for name in mutants.LEFT_OUT if not any(site.name.startswith(name) for site in SITES)] == []
