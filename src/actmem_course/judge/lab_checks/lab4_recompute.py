"""Lab 4: recomputation."""

from __future__ import annotations

from functools import partial

from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.lab_checks import lab4_hints as hints
from actmem_course.judge.lab_checks.lab4_checkpoint import check_numbers, check_stops_early
from actmem_course.judge.lab_checks.lab4_layer import check_full_layer, check_selective_layer, lab4_reward
from actmem_course.judge.lab_checks.lab4_random_numbers import check_random_numbers
from actmem_course.judge.workbench import Bench


def check_checkpoint_stopping_early(b: Bench) -> None:
    name = "checkpoint_stopping_early"
    check_numbers(b, name)
    check_random_numbers(b, name)
    check_stops_early(b, name)


LAB = Lab(
    "lab4_recompute",
    "Lab 4: recomputation",
    (
        Exercise("4.1", "checkpoint", partial(check_numbers, name="checkpoint"), hints.CHECKPOINT),
        Exercise("4.2", "checkpoint", partial(check_random_numbers, name="checkpoint"), hints.RANDOM_NUMBERS),
        Exercise("4.3", "selective_layer", check_selective_layer, hints.SELECTIVE_LAYER),
        Exercise("4.4", "full_layer", check_full_layer, hints.FULL_LAYER),
        Exercise("4.5", "checkpoint_stopping_early", check_checkpoint_stopping_early, hints.STOPPING_EARLY),
    ),
    reward=lab4_reward,
    one_process=True,
)
