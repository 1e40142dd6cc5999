"""By which powers of s, b, h, a is a prediction off?"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from actmem.config import ModelShape
from actmem_course.judge.verdict import Wrong

_LETTERS = "abhs"  # the order of ModelShape.letters
_CONSTANTS = (1, 2, 4, 8, 16, 3, 6)


def check_whole_number(what: str, value: Any) -> int:
    """``value`` as an int; numpy's integers are whole numbers as well.  Raises Wrong unless it is one."""
    if value is None:
        raise Wrong(f"{what} is None: is a return missing?")
    try:
        # numpy's booleans have no index; Python's and torch's have one.
        if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
            raise TypeError
        return operator.index(value)
    except TypeError:
        hint = "; divide with //" if isinstance(value, float) else ""
        raise Wrong(f"{what} must be a whole number, not {value!r}{hint}") from None


def explain_ratio(pairs: Sequence[tuple[int, int]], shapes: Sequence[ModelShape]) -> str:
    """How found values relate to true ones, as a product of small powers of the letters: ``lacks the factor a``.

    pairs: found and true for each shape.
    """
    for exponents in sorted(itertools.product(range(-2, 3), repeat=4), key=lambda e: sum(map(abs, e))):
        for constant in (c for n in _CONSTANTS for c in (Fraction(n), Fraction(1, n))):
            if all(
                found == true * constant * _product(exponents, shape) for (found, true), shape in zip(pairs, shapes)
            ):
                return _words(constant, exponents)
    found, true = pairs[0]
    a, b, h, s = shapes[0].letters()
    return f"is {found:,} B where {true:,} B are kept (s={s} b={b} h={h} a={a})"


def _product(exponents: Sequence[int], shape: ModelShape) -> Fraction:
    result = Fraction(1)
    for letter, exponent in zip(shape.letters(), exponents):
        result *= Fraction(letter) ** exponent
    return result


def _words(constant: Fraction, exponents: Sequence[int]) -> str:
    lacking = [f"{letter}{'²' * (e == -2)}" for letter, e in zip(_LETTERS, exponents) if e < 0]
    surplus = [f"{letter}{'²' * (e == 2)}" for letter, e in zip(_LETTERS, exponents) if e > 0]
    parts = []
    if lacking:
        parts.append(f"lacks the factor {'·'.join(lacking)}")
    if surplus:
        parts.append(f"has the extra factor {'·'.join(surplus)}")
    if constant != 1:
        parts.append(f"is {constant} of what is kept" if constant < 1 else f"is {constant} times what is kept")
    return " and ".join(parts)
