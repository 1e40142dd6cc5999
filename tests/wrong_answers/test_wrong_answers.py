"""Every planted mistake comes out as wrong, with the right diagnosis."""

import re

import pytest

from actmem_course.judge.judging import Judge
from actmem_course.judge.naming import stated_edits
from actmem_course.judge.outline import load_lab
from actmem_course.judge.solutions import lab5_pipeline as lab5
from tests.labs.judged import judged, judged_names
from tests.tiers import at_night
from tests.wrong_answers.edits import EDITS, edited, lab_of


def sizes_of(lab):
    """On how many ranks a mistake is judged: by day on the first."""
    return (1,) if load_lab(lab).one_process else (4, 2)


EDIT_CASES = [
    (which, size) if size != 2 else at_night((which, size))
    for which, edit in enumerate(EDITS)
    for size in sizes_of(lab_of(edit[0]))
]


def check(verdict, diagnosis):
    assert verdict.status == "wrong", verdict
    assert re.search(diagnosis, verdict.diagnosis), verdict.diagnosis


@pytest.mark.parametrize(("which", "size"), EDIT_CASES, ids=lambda value: str(value))
def test_edit_named(which, size):
    number = EDITS[which][0]
    check(judged_names(lab_of(number), number, edited(which), size), EDITS[which][1])


def test_one_number_that_is_the_same_by_chance_names_nothing():
    def how_many_fit(budget, flight, full, recomputed):
        right = lab5.how_many_fit(budget, flight, full, recomputed)
        return flight if (budget, full) == (100, 30) else right  # as if recomputed_bytes were full_bytes

    verdict = judged("lab5_pipeline", "5.4", how_many_fit)
    assert verdict.diagnosis.endswith("30 B or 10 B each: the result is 4; expected 3")


def test_none_comes_twice():
    assert len({(number, *pieces) for number, _, *pieces in EDITS}) == len(EDITS)


def test_what_uses_a_function_that_is_wrong_in_one_of_its_exercises_is_blocked_by_that_one():
    lab = load_lab("lab4_recompute")
    (second,) = lab.choose(["4.2"], "number")
    functions = stated_edits(second)[0].names("")
    judge = Judge(lab, [functions])
    verdicts = [judge.judge(exercise) for exercise in lab.choose(["4.1", "4.2", "4.4"], "number")]
    assert [verdict.status for verdict in verdicts] == ["passed", "wrong", "blocked"]
    assert "by 4.2 (checkpoint)" in verdicts[2].diagnosis
