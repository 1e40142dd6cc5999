"""Right answers written in another way than ours pass: no false alarm."""

import pytest

from tests.labs.learners import judged, lab_of
from tests.right_answers import lab2, lab3, lab4, lab5, lab6, lab7, lab9, lab10  # noqa: F401  they register
from tests.right_answers.register import RIGHT
from tests.tiers import at_night

CASES = [(*case, 1 if lab_of(case[0]).one_process else 4) for case in RIGHT]
CASES += [at_night((*case, 2)) for case in RIGHT if not lab_of(case[0]).one_process]


@pytest.mark.parametrize(("number", "function", "size"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_passes(number, function, size):
    verdict = judged(number, function, size=size)
    assert verdict.status == "passed", verdict.diagnosis
