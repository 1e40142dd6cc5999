"""Right answers written in another way than ours pass: no false alarm."""

import inspect

import pytest

from actmem_course.judge.outline import LAB_NAMES
from tests.labs.learners import judged, lab_of
from tests.right_answers import lab1, lab2, lab3, lab4, lab5, lab6, lab7, lab8, lab9, lab10  # noqa: F401  they register
from tests.right_answers.register import RIGHT
from tests.tiers import at_night

CASES = [(*case, 1 if lab_of(case[0]).one_process else 4) for case in RIGHT]
CASES += [at_night((*case, 2)) for case in RIGHT if not lab_of(case[0]).one_process]
WAYS = ("DTensor.from_local", "redistribute(", "functional.all_reduce", "all_gather_tensor_autograd", "checkpoint(", "fork_rng")  # fmt: skip


@pytest.mark.parametrize(("number", "function", "size"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_passes(number, function, size):
    verdict = judged(number, function, size=size)
    assert verdict.status == "passed", verdict.diagnosis


def test_every_lab_and_every_way_of_torch_is_there():
    assert {lab_of(number).name for number, _ in RIGHT} == set(LAB_NAMES)
    source = "".join(inspect.getsource(function) for _, function in RIGHT)
    assert [way for way in WAYS if way not in source] == []
