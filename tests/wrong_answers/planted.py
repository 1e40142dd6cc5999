"""A register of planted mistakes: the exercise, a wrong answer, and the words that its diagnosis must contain."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """lab: file name without .py.  diagnosis: a regular expression.  size: the number of ranks it needs."""

    lab: str
    number: str
    function: Callable
    diagnosis: str
    size: int = 2
    target: str | None = None

    @property
    def id(self):
        return f"{self.number}-{self.function.__name__}"


PLANTED: list[Planted] = []


def planted(lab, number, diagnosis, size=2, target=None):
    """Register the decorated function as a wrong answer to an exercise."""

    def register(function):
        PLANTED.append(Planted(lab, number, function, diagnosis, size, target))
        return function

    return register
