"""The report counts what pytest says, and the README shows what is stored."""

from actmem.torch_private import CHECKED_ON
from tests import matrix, report
from tests.report import Case, cases_of, page, stored, summary, sums, with_summary

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.labs.test_a" name="one[2]" time="1.5"><properties><property name="kind" value="fault"/></properties></testcase>
<testcase classname="tests.labs.test_a" name="two" time="2"><properties><property name="kind" value="fault"/></properties><failure/></testcase>
<testcase classname="tests.labs.test_a" name="root" time="0"><properties><property name="kind" value="fault"/></properties><skipped/></testcase>
<testcase classname="tests.test_b" name="many" time="3"><properties><property name="kind" value="bad_input"/><property name="inputs" value="600"/></properties></testcase>
<testcase classname="tests.test_c" name="else" time="3"/>
</testsuite></testsuites>"""


def test_cases_are_counted_by_what_became_of_them():
    cases = cases_of(JUNIT)
    assert cases[0] == Case("test_a: one[2]", "fault", "passed", 1, 1.5)
    assert sums(cases, "fault") == {"passed": 1, "failed": 1, "skipped": 1}
    assert sums(cases, "bad_input") == {"passed": 600, "failed": 0, "skipped": 0}


def test_the_summary_hides_nothing_that_failed():
    counts = {kind: sums(cases_of(JUNIT), kind) for kind in report.KINDS}
    results = {"date": "2026-01-01", "versions": {"Python": "3.0"}, "counts": counts, "cases": []}
    broken = [{"torch": CHECKED_ON[0], "build": "x", "python": "3", "date": "2026-01-02", "parts": {}}]
    mutated = {"date": "2026-01-03", "torch": "2", "tried": [{"site": "a", "caught": "", "seconds": 1}]}
    repeated = {"lab6": {"runs": 8, "crashes": [{"code": -6, "errors": ""}], "date": "2026-01-04"}}
    text = summary(results, broken, mutated, repeated)
    assert f"| torch versions | 0 of {len(CHECKED_ON)} work | 2026-01-02 |" in text
    assert "| mutants of the library | 0 of 1 caught | 2026-01-03 |" in text
    assert "| faults survived | 1 of 2 | 2026-01-01 |" in text
    assert "| crashes of lab 6's training on two | 1 in 8 runs | 2026-01-04 |" in text
    assert "| bad inputs answered | 600 of 600 | 2026-01-01 |" in text
    assert "**nothing**" in page(results, broken, mutated, repeated) and text in page(
        results, broken, mutated, repeated
    )


def test_the_readme_shows_the_stored_results():
    readme = matrix.README.read_text(encoding="utf-8")
    assert with_summary(readme, summary(*stored())) == readme


def test_no_stored_run_crashed():
    assert [name for name, entry in stored()[3].items() if entry["crashes"]] == []


def test_no_stored_fault_or_bad_input_was_too_much():
    counts = stored()[0].get("counts", {})
    assert [kind for kind, ends in counts.items() if ends["failed"]] == []
