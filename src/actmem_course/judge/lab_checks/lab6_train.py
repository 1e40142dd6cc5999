"""Lab 6: a GPT trained under every mode."""

from __future__ import annotations

from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.lab_checks import lab6_hints as hints
from actmem_course.judge.lab_checks.lab6_batch import check_batch
from actmem_course.judge.lab_checks.lab6_curves import check_train
from actmem_course.judge.lab_checks.lab6_model import check_make_model
from actmem_course.judge.lab_checks.lab6_norm import check_gradient_norm
from actmem_course.judge.lab_checks.lab6_reward import lab6_reward
from actmem_course.judge.lab_checks.lab6_step import check_training_step

LAB = Lab(
    "lab6_train",
    "Lab 6: train under every mode",
    (
        Exercise("6.1", "batch", check_batch, hints.BATCH),
        Exercise("6.2", "make_model", check_make_model, hints.MAKE_MODEL, takes_group=True),
        Exercise("6.3", "gradient_norm", check_gradient_norm, hints.GRADIENT_NORM, takes_group=True),
        Exercise("6.4", "training_step", check_training_step, hints.TRAINING_STEP, takes_group=True),
        Exercise("6.5", "train", check_train, hints.TRAIN),
    ),
    reward=lab6_reward,
)
