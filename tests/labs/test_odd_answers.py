"""Whatever a learner's function returns or raises, every exercise has a sentence for it, and none of ours passes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from actmem_course.judge.outline import LAB_NAMES, load_lab
from tests.labs.judged import judged

ODD: dict[str, Callable[..., Any]] = {
    "nothing": lambda *args, **kwargs: None,
    "a number": lambda *args, **kwargs: 1.5,
    "a word": lambda *args, **kwargs: "ready",
    "an empty list": lambda *args, **kwargs: [],
    "a small tensor": lambda *args, **kwargs: torch.zeros(2),
    "its first argument": lambda *args, **kwargs: args[0],
    "no arguments": lambda: None,
}


@pytest.mark.parametrize("lab", LAB_NAMES)
def test_odd_answers(lab):
    for exercise in load_lab(lab).exercises:
        for odd, answer in ODD.items():
            verdict = judged(lab, exercise.number, answer, size=2)
            assert verdict.status in ("wrong", "error"), (odd, verdict)
            assert len(verdict.diagnosis) > 15, (odd, verdict)
            assert not verdict.where or verdict.where.startswith("test_odd_answers.py"), (odd, verdict)
            assert "actmem" not in verdict.diagnosis, (odd, verdict)
