"""Bad arguments are refused at the door, in one line that names the argument and the rule.

``checked`` reads the rules off a function's signature, so that every public formula has the same
ones: the annotation says the kind of value, the name says from where to where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache, wraps
from inspect import signature
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

#: Larger sizes than this are typing errors, not models.
LARGEST_SIZE = 2**31 - 1
#: The same for the ranks of one kind, and for the chunks of a rank.
LARGEST_PARALLEL_SIZE = 2**16
#: And for amounts: bytes, FLOPs, rates.
LARGEST_AMOUNT = 10**30

#: Names whose values may be 0, and endings of names that are amounts, not sizes.
_FROM_ZERO = ("rank", "microbatch", "capacity", "fixed_share", "send_time", "routed_tokens", "chunk")
_COUNTS = ("bytes", "flops")
_AMOUNTS = (*_COUNTS, "per_second")
#: A whole number whose range the function itself knows.
_OF_FUNCTION = ("pipeline_rank", "budget_bytes")
_CHOICES: dict[str, tuple] = {"element_size": (2, 4, 8), "device_type": ("cpu", "cuda")}

_Function = TypeVar("_Function", bound=Callable)


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


def checked(function: _Function) -> _Function:
    """Check every argument of each call by its parameter's annotation and name; raise ConfigError.

    int: a whole number from 1 on, or from 0 where the name says so.  float, Fraction: a finite
    number, above 0 likewise.  bool, str, a class: one of these.  list[X], Iterable[X]: each
    element, and the function gets a list.  X | None: None as well.  Recompute | str: a mode.
    """
    names = tuple(signature(function).parameters)
    hints = cache(lambda: get_type_hints(function))  # the names in them exist once the module is loaded

    @wraps(function)
    def call(*args, **kwargs):
        rules = hints()
        args = (
            *(_check(name, value, rules.get(name, object)) for name, value in zip(names, args)),
            *args[len(names) :],
        )
        kwargs = {name: _check(name, value, rules.get(name, object)) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _check(name: str, value: object, hint: object) -> object:
    """``value``, if it is what ``hint`` says; a sequence as a list, the name of a mode as the mode."""
    # Python 3.10 turns the hint of a parameter whose default is None into typing's own Union.
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return value
    kind = next(kind for kind in kinds if kind is not NoneType)
    by_name = getattr(kind, "of", None)
    if name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    elif by_name:
        return by_name(value)
    elif kind is int:
        least = -math.inf if name in _OF_FUNCTION else 0 if name in _FROM_ZERO or name.endswith(_COUNTS) else 1
        check_size(name, value, LARGEST_AMOUNT if name.endswith(_AMOUNTS) else LARGEST_SIZE, least)
    elif kind in (float, Fraction):
        _check_number(name, value)
    elif get_origin(kind) in (list, Iterable):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigError(name, f"must be a list, got {shown(value)}")
        element = get_args(kind)[0] if get_args(kind) else object
        return [_check(name, one, element) for one in value]
    elif get_origin(kind) is Callable:
        if not callable(value):
            raise ConfigError(name, f"must be a function, got {shown(value)}")
    elif isinstance(kind, type) and not isinstance(value, kind):
        wanted = "True or False" if kind is bool else "text" if kind is str else f"of type {kind.__name__}"
        raise ConfigError(name, f"must be {wanted}, got {shown(value)}")
    return value


def _check_number(name: str, value: Any) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, Fraction))
        or not -LARGEST_AMOUNT <= value <= LARGEST_AMOUNT
    ):
        raise ConfigError(name, f"must be a finite number, got {shown(value)}")
    if value < 0 or (value == 0 and name not in _FROM_ZERO):
        raise ConfigError(name, f"must be {'at least' if name in _FROM_ZERO else 'above'} 0, got {shown(value)}")
