"""Every planted mistake comes out as wrong, with the right diagnosis."""

import re
from collections import Counter

import pytest

from actmem_course.judge.catalogue import load_lab
from actmem_course.judge.judging import Judge
from actmem_course.judge.naming import stated_edits
from tests.labs.judged import judged, judged_names
from tests.tiers import at_night
from tests.wrong_answers import (  # noqa: F401  they register
    lab2_blocks,
    lab2_linears,
    lab2_vocabulary,
    lab3_replicas,
)
from tests.wrong_answers.edits import EDITS, edited, lab_of
from tests.wrong_answers.planted import PLANTED


def sizes_of(lab, size):
    """On how many ranks a mistake is judged: most on two and on four."""
    return (1,) if load_lab(lab).one_process else (4, 2) if size == 2 else (size,)


def first_by_day(*cases):
    return [cases[0], *map(at_night, cases[1:])]


CASES = [
    case for mistake in PLANTED for case in first_by_day(*((mistake, n) for n in sizes_of(mistake.lab, mistake.size)))
]
EDIT_CASES = [
    case
    for which, edit in enumerate(EDITS)
    for case in first_by_day(*((which, n) for n in sizes_of(lab_of(edit[0]), 2)))
]
# An edit of the whole training takes a quarter of a minute: one in three by day.
EDIT_CASES = [
    at_night(case) if not hasattr(case, "marks") and EDITS[case[0]][0] == "6.4" and case[0] % 3 else case
    for case in EDIT_CASES
]


def check(verdict, diagnosis):
    assert verdict.status == "wrong", verdict
    assert re.search(diagnosis, verdict.diagnosis), verdict.diagnosis


@pytest.mark.parametrize(("mistake", "size"), CASES, ids=lambda value: getattr(value, "id", value))
def test_named(mistake, size):
    check(judged(mistake.lab, mistake.number, mistake.function, mistake.target, size), mistake.diagnosis)


@pytest.mark.parametrize(("which", "size"), EDIT_CASES, ids=lambda value: str(value))
def test_edit_named(which, size):
    number = EDITS[which][0]
    check(judged_names(lab_of(number), number, edited(which), size), EDITS[which][1])


def test_there_are_many_and_none_twice():
    assert len(CASES) + len(EDIT_CASES) >= 300
    assert not [name for name, count in Counter(mistake.id for mistake in PLANTED).items() if count > 1]


def test_what_uses_a_function_that_is_wrong_in_one_of_its_exercises_is_blocked_by_that_one():
    lab = load_lab("lab4_recompute")
    (second,) = lab.choose(["4.2"], "number")
    functions = stated_edits(second)[0].names("")
    judge = Judge(lab, [functions])
    verdicts = [judge.judge(exercise) for exercise in lab.choose(["4.1", "4.2", "4.4"], "number")]
    assert [verdict.status for verdict in verdicts] == ["passed", "wrong", "blocked"]
    assert "by 4.2 (checkpoint)" in verdicts[2].diagnosis
