"""By which powers of a layer's sizes is a prediction off?"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from actmem_course.judge.verdict import Wrong

_CONSTANTS = {Fraction(n) for n in (1, 2, 4, 8, 16, 3, 6)} | {Fraction(1, n) for n in (1, 2, 4, 8, 16, 3, 6)}
#: No more letters than this are wrong at once, a square counting as two.
_MOST_LETTERS = 4


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


def explain_ratio(pairs: Sequence[tuple[int, int]], sizes: Sequence[Mapping[str, int]], has: str) -> str:
    """How found values relate to true ones, as a product of small powers of the letters: ``lacks the factor a``.

    pairs: found and true for each case.  sizes: the value of each letter in it.  has: the letters of the
    true value: what the found one lacks is one of them.
    """
    powers = itertools.product(range(-2, 3), repeat=len(sizes[0]))
    near = [exponents for exponents in powers if sum(map(abs, exponents)) <= _MOST_LETTERS]
    for exponents in sorted(near, key=lambda e: sum(map(abs, e))):
        constants = {Fraction(f, t) / _product(exponents, letters) for (f, t), letters in zip(pairs, sizes)}
        if len(constants) == 1 and constants <= _CONSTANTS:
            return _words(constants.pop(), dict(zip(sizes[0], exponents)), has)
    found, true = pairs[0]
    return f"is {found:,} B where {true:,} B are kept ({' '.join(f'{name}={n}' for name, n in sizes[0].items())})"


def _product(exponents: Sequence[int], letters: Mapping[str, int]) -> Fraction:
    result = Fraction(1)
    for size, exponent in zip(letters.values(), exponents):
        result *= Fraction(size) ** exponent
    return result


def _words(constant: Fraction, powers: Mapping[str, int], has: str) -> str:
    lacking = [f"{letter}{'²' * (e == -2)}" for letter, e in powers.items() if e < 0 and letter in has]
    divided = [f"{letter}{'²' * (e == -2)}" for letter, e in powers.items() if e < 0 and letter not in has]
    surplus = [f"{letter}{'²' * (e == 2)}" for letter, e in powers.items() if e > 0]
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
