"""Every planted mistake comes out as wrong, with the right diagnosis."""

import re
from collections import Counter

import pytest

from actmem_course.judge.catalogue import load_lab, solutions_of
from actmem_course.judge.judging import judge
from actmem_course.judge.workbench import Bench
from actmem_course.rank_store import RankStore
from tests.labs.judged import joined, judged, judged_alone
from tests.tiers import at_night
from tests.wrong_answers import (  # noqa: F401  they register
    lab1,
    lab2_blocks,
    lab2_linears,
    lab2_operators,
    lab2_vocabulary,
    lab3_layer,
    lab3_operators,
    lab3_replicas,
    lab4,
    lab5,
    lab6_data,
    lab6_training,
    lab7,
    lab8,
)
from tests.wrong_answers.edits import EDITS, edited, lab_of
from tests.wrong_answers.planted import PLANTED


def sizes_of(lab, size):
    """On how many ranks a mistake is judged: most on two and on four."""
    return (1,) if load_lab(lab).one_process else (2, 4) if size == 2 else (size,)


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


def check(verdicts, diagnosis):
    assert len(set(verdicts)) == 1, "every rank has the same verdict"
    verdict = verdicts[0]
    assert verdict.status == "wrong", verdict
    assert re.search(diagnosis, verdict.diagnosis), verdict.diagnosis


@pytest.mark.parametrize(("mistake", "size"), CASES, ids=lambda value: getattr(value, "id", value))
def test_named(pools, mistake, size):
    arguments = mistake.lab, mistake.number, mistake.function, mistake.target
    check(pools[size].run(judged, *arguments) if size > 1 else [judged_alone(*arguments)], mistake.diagnosis)


def judged_edit(which, store=None):
    lab = load_lab(lab_of(EDITS[which][0]))
    return judge(lab, lab.choose([EDITS[which][0]], "number"), Bench(edited(which), store or joined()))[0]


@pytest.mark.parametrize(("which", "size"), EDIT_CASES, ids=lambda value: str(value))
def test_edit_named(pools, which, size):
    verdicts = pools[size].run(judged_edit, which) if size > 1 else [judged_edit(which, RankStore())]
    check(verdicts, EDITS[which][1])


def test_there_are_many_and_none_twice():
    assert len(CASES) + len(EDIT_CASES) >= 400
    assert not [name for name, count in Counter(mistake.id for mistake in PLANTED).items() if count > 1]


def test_what_uses_a_function_that_is_wrong_in_one_of_its_exercises_is_blocked_by_that_one():
    lab = load_lab("lab4_recompute")
    functions = solutions_of(lab.name) | {"checkpoint": lab4.seeds_again, "__file__": lab4.__file__}
    exec("def full_layer(x, w, dropouts): return checkpoint(lambda y: layer(y, w, dropouts), x)", functions)
    verdicts = judge(lab, lab.choose(["4.1", "4.2", "4.4"], "number"), Bench(functions, RankStore()))
    assert [verdict.status for verdict in verdicts] == ["passed", "wrong", "todo"]
    assert "blocked by 4.2 (checkpoint)" in verdicts[2].diagnosis
