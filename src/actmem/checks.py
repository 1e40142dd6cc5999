"""Bad arguments are refused where a size enters, in one line that names the argument and the rule.

Dataclasses of sizes check themselves; the few formulas and commands that take plain numbers check those.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Larger sizes than this are typing errors, not models.
LARGEST_SIZE = 2**31 - 1
#: The same for the ranks of one kind, and for the chunks of a rank.
LARGEST_PARALLEL_SIZE = 2**16
#: Bytes of an activation's element.
ELEMENT_BYTES = (2, 4, 8)


class ConfigError(ValueError):
    """A size breaks a rule.  The message is one line: the argument, its value, the rule."""

    def __init__(self, argument: str, rule: str):
        self.argument = argument
        self.rule = rule
        super().__init__(f"{argument}: {rule}")


def check_size(argument: str, value: object, largest: float = LARGEST_SIZE, least: float = 1) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``largest``; raise ConfigError if not."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(argument, f"must be a whole number, got {shown(value)}")
    if value < least:
        raise ConfigError(argument, f"must be at least {least}, got {shown(value)}")
    if value > largest:
        raise ConfigError(argument, f"must be at most {largest}, got {shown(value)}")
    return value


def check_sizes(**sizes: object) -> None:
    """Raise ConfigError unless each is a whole number from 1 on."""
    for argument, value in sizes.items():
        check_size(argument, value)


def check_divides(argument: str, value: int, divisor_name: str, divisor: int) -> int:
    """Return ``value // divisor``; raise ConfigError on ``argument`` if there is a remainder."""
    if value % divisor:
        raise ConfigError(argument, f"{value} must be divisible by {divisor_name} = {divisor}")
    return value // divisor


def check_choice(argument: str, value: object, choices: Iterable) -> None:
    """Raise ConfigError if ``value`` is none of ``choices``."""
    choices = tuple(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(argument, f"must be one of {', '.join(map(str, choices))}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as part of one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int can be too long for it, and a class of anybody's can do anything
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"
