"""By which powers of s, b, h, a is a prediction off?"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
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


def explain_ratio(pairs: Sequence[tuple[int, int]], shapes: Sequence[ModelShape], has: str = _LETTERS) -> str:
    """How found values relate to true ones, as a product of small powers of the letters: ``lacks the factor a``.

    pairs: found and true for each shape.  has: the letters of the true one: what it lacks is one of them.
    """
    for exponents in sorted(itertools.product(range(-2, 3), repeat=4), key=lambda e: sum(map(abs, e))):
        for constant in (c for n in _CONSTANTS for c in (Fraction(n), Fraction(1, n))):
            if all(
                found == true * constant * _product(exponents, shape) for (found, true), shape in zip(pairs, shapes)
            ):
                return _words(constant, exponents, has)
    found, true = pairs[0]
    a, b, h, s = shapes[0].letters()
    return f"is {found:,} B where {true:,} B are kept (s={s} b={b} h={h} a={a})"


def _product(exponents: Sequence[int], shape: ModelShape) -> Fraction:
    result = Fraction(1)
    for letter, exponent in zip(shape.letters(), exponents):
        result *= Fraction(letter) ** exponent
    return result


def _words(constant: Fraction, exponents: Sequence[int], has: str) -> str:
    powers = dict(zip(_LETTERS, exponents))
    lacking = [f"{letter}{'²' * (e == -2)}" for letter, e in powers.items() if e < 0 and letter in has]
    divided = [f"{letter}{'²' * (e == -2)}" for letter, e in powers.items() if e < 0 and letter not in has]
    surplus = [f"{letter}{'²' * (e == 2)}" for letter, e in zip(_LETTERS, exponents) if e > 0]
    parts = []
    if lacking:
        parts.append(f"lacks the factor {'·'.join(lacking)}")
    if divided:
        parts.append(f"is divided by {'·'.join(divided)}, which it has nothing to do with")
    if surplus:
        parts.append(f"has the extra factor {'·'.join(surplus)}")
    if constant != 1:
        parts.append(f"is {constant} of what is kept" if constant < 1 else f"is {constant} times what is kept")
    return " and ".join(parts)


def explain_difference(
    difference: int,
    kept: Mapping[str, int],
    without_recomputation: Mapping[str, int],
    whole: Mapping[str, int],
    recompute: str,
) -> str:
    """Which rows a sum has too many or too few, as few as possible; "" if no two of them explain it.

    kept: bytes by term; the others: the same without recomputation, and on one device.
    """
    causes: list[tuple[str, int]] = []
    for term, size in without_recomputation.items():
        if term in kept:
            causes += [(f"{term} is left out", -size), (f"{term} is counted twice", size)]
            causes += [(f"{term} is not divided by t", whole[term] - size)] if whole.get(term, size) != size else []
        else:
            causes.append((f"{term} is counted, but recompute={recompute!r} drops it", size))
    for count in (1, 2):
        fits = [
            cause for cause in itertools.combinations(causes, count) if sum(size for _, size in cause) == difference
        ]
        if fits:
            words = list(dict.fromkeys(" and ".join(word for word, _ in cause) for cause in fits))
            return words[0] if len(words) == 1 else "one of: " + "; ".join(words[:4]) + "; …" * (len(words) > 4)
    return ""
