"""Whatever a learner's function returns or raises, every exercise has a sentence for it, and none of ours passes it."""

import pytest
import torch

from actmem_course.judge.outline import LAB_NAMES, load_lab
from tests.labs.judged import judged


def nothing(*args, **kwargs):
    return None


def a_number(*args, **kwargs):
    return 1.5


def a_word(*args, **kwargs):
    return "ready"


def an_empty_list(*args, **kwargs):
    return []


def a_small_tensor(*args, **kwargs):
    return torch.zeros(2)


def its_first_argument(*args, **kwargs):
    return args[0]


def no_arguments():
    return None


ODD = (nothing, a_number, a_word, an_empty_list, a_small_tensor, its_first_argument, no_arguments)


@pytest.mark.parametrize("lab", LAB_NAMES)
def test_odd_answers(lab):
    for exercise in load_lab(lab).exercises:
        for odd in ODD:
            verdict = judged(lab, exercise.number, odd, size=2)
            assert verdict.status in ("wrong", "error"), (odd, verdict)
            assert len(verdict.diagnosis) > 15, (odd, verdict)
            assert not verdict.where or verdict.where.startswith("test_odd_answers.py"), (odd, verdict)
            assert "actmem" not in verdict.diagnosis, (odd, verdict)
