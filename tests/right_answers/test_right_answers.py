"""Right answers written in another way than ours pass: no false alarm."""

import inspect

import pytest

from actmem_course.judge.outline import LAB_NAMES, load_lab
from tests.labs.judged import judged
from tests.right_answers import lab1, lab2, lab3, lab4, lab5, lab6, lab7, lab8, lab9, lab10  # noqa: F401  they register
from tests.right_answers.register import RIGHT
from tests.tiers import at_night

CASES = [(*case, 1 if load_lab(case[0]).one_process else 4) for case in RIGHT]
CASES += [at_night((*case, 2)) for case in RIGHT if not load_lab(case[0]).one_process]


@pytest.mark.parametrize(("lab", "number", "function", "size"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_passes(lab, number, function, size):
    verdict = judged(lab, number, function, size=size)
    assert verdict.status == "passed", verdict.diagnosis


def test_every_lab_and_every_way_of_torch_is_there():
    assert {lab for lab, _, _ in RIGHT} == set(LAB_NAMES)
    source = "".join(inspect.getsource(function) for _, _, function in RIGHT)
    for way in (
        "DTensor.from_local",
        "redistribute(",
        "functional.all_reduce",
        "all_gather_tensor_autograd",
        "checkpoint(",
        "fork_rng",
    ):
        assert way in source
