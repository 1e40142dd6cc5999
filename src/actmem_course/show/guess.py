"""What a guess is answered, in a notebook and on a page of the site."""

from __future__ import annotations

from dataclasses import dataclass

from actmem_course.show.style import three_digits

#: What a form sends in place of a guess when its second button is pressed.
SHOW_ME = "show me"


@dataclass(frozen=True)
class Judged:
    """What a guess is answered.  value: the guess as a number; None if it was none."""

    reply: str
    refused: bool = False
    value: float | None = None


def judged(guess: str, answer: float, unit: str = "", because: str = "") -> Judged:
    """The answer to a guess, how far off it was, and why; or that it is no number."""
    unit = unit if unit in ("", "%") else f" {unit}"
    reason = f"\n{because}" if because else ""
    if guess == SHOW_ME:
        return Judged(f"It is {_plain(answer)}{unit}.{reason}")
    value = _number(guess)
    if value is None:
        what = guess.strip() or "An empty field"
        return Judged(f"✗ {what} is not a number: write it like 1.5 or 1,500", refused=True)
    told = f"You said {_plain(value)}{unit}. It is {_plain(answer)}{unit}: {_how_far(value, answer)}."
    return Judged(told + reason, value=value)


def _number(text: str) -> float | None:
    """The text as a finite number, with or without commas between thousands; None if it isn't one."""
    try:
        number = float(text.replace(",", "").replace("_", "").rstrip("% "))
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _plain(number: float) -> str:
    return (
        f"{number:,}"
        if isinstance(number, int)
        else f"{int(number):,}"
        if number == int(number)
        else three_digits(number)
    )


def _how_far(guess: float, answer: float) -> str:
    """How far off a guess is, as a factor; within 2% it is right."""
    if abs(guess - answer) <= 0.02 * abs(answer):
        return "you have it"
    if guess * answer <= 0:
        return "not close"
    factor = max(guess / answer, answer / guess)
    times = f"{three_digits(factor)} times" if factor >= 1.5 else f"{(factor - 1):.0%}"
    return f"{times} too {'high' if abs(guess) > abs(answer) else 'low'}"
