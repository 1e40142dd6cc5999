"""Lab 4's exercises that ask for a checkpoint function."""

from __future__ import annotations

from actmem_course.judge.lab_checks.lab4_checkpoint import check_numbers, check_stops_early
from actmem_course.judge.lab_checks.lab4_random_numbers import check_random_numbers
from actmem_course.judge.workbench import Bench


def check_checkpoint(b: Bench) -> None:
    check_numbers(b, "checkpoint")


def check_checkpoint_of_dropout(b: Bench) -> None:
    check_random_numbers(b, "checkpoint")


def check_checkpoint_stopping_early(b: Bench) -> None:
    name = "checkpoint_stopping_early"
    check_numbers(b, name)
    check_random_numbers(b, name)
    check_stops_early(b, name)
