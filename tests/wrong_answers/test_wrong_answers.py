"""Every planted mistake comes out as wrong, with the right diagnosis."""

import re
from collections import Counter

import pytest

from tests.labs.judged import judged, judged_alone
from tests.wrong_answers import (  # noqa: F401  they register
    lab1, lab2_blocks, lab2_linears, lab2_operators, lab2_vocabulary,
    lab3_layer, lab3_operators, lab3_replicas, lab4, lab5, lab6_data, lab6_training,
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
