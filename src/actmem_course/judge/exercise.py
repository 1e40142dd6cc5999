"""What a lab asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actmem.config import ConfigError


@dataclass(frozen=True)
class Exercise:
    """One function to write, and how it is judged.

    check: called with a Bench; raises Wrong, or returns a remark or None.  hints: from a nudge to
    nearly the answer.  seconds: a rank that works on it for longer is taken to be stuck.
    takes_group: it is handed a process group, and is judged on several.
    """

    number: str
    function: str
    check: Callable
    hints: tuple[str, ...]
    seconds: int = 30
    takes_group: bool = False


@dataclass(frozen=True)
class Lab:
    """A lab: its exercises in order, and what is measured once all are passed.

    reward: called with a Bench on every rank, returns a Reward (see ``reward``).
    one_process: it needs no ranks, so it is started without torchrun.
    """

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    reward: Callable | None = None
    one_process: bool = False

    def choose(self, numbers: list[str], argument: str) -> tuple[Exercise, ...]:
        """The exercises of these numbers, all if there are none.  Raises ConfigError on an unknown number."""
        if not numbers:
            return self.exercises
        known = [exercise.number for exercise in self.exercises]
        for number in numbers:
            if number not in known:
                raise ConfigError(argument, f"must be one of {', '.join(known)}, got {number}")
        return tuple(exercise for exercise in self.exercises if exercise.number in numbers)
