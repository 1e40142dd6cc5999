"""Every planted mistake comes out as wrong, with the right diagnosis."""

import re
from collections import Counter

import pytest

from actmem_course.judge.catalogue import load_lab, solutions_of
from actmem_course.judge.judging import judge
from actmem_course.judge.workbench import Bench
from actmem_course.rank_store import RankStore
from tests.labs.judged import judged, judged_alone
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
)
from tests.wrong_answers.planted import PLANTED


@pytest.mark.parametrize("mistake", PLANTED, ids=lambda mistake: mistake.id)
def test_named(pools, mistake):
    arguments = mistake.lab, mistake.number, mistake.function, mistake.target
    verdicts = pools[mistake.size].run(judged, *arguments) if mistake.size > 1 else [judged_alone(*arguments)]
    assert len(set(verdicts)) == 1, "every rank has the same verdict"
    verdict = verdicts[0]
    assert verdict.status == "wrong", verdict
    assert re.search(mistake.diagnosis, verdict.diagnosis), verdict.diagnosis


def test_there_are_many_and_none_twice():
    assert len(PLANTED) >= 40
    assert not [name for name, count in Counter(mistake.id for mistake in PLANTED).items() if count > 1]


def test_what_uses_a_function_that_is_wrong_in_one_of_its_exercises_is_blocked_by_that_one():
    lab = load_lab("lab4_recompute")
    functions = solutions_of(lab.name) | {"checkpoint": lab4.seeds_again, "__file__": lab4.__file__}
    exec("def full_layer(x, w, dropouts): return checkpoint(lambda y: layer(y, w, dropouts), x)", functions)
    verdicts = judge(lab, lab.choose(["4.1", "4.2", "4.4"], "number"), Bench(functions, RankStore()))
    assert [verdict.status for verdict in verdicts] == ["passed", "wrong", "todo"]
    assert "blocked by 4.2 (checkpoint)" in verdicts[2].diagnosis
