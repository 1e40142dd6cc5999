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
    (found, true), letters = next((pair, z) for pair, z in zip(pairs, sizes) if pair[0] != pair[1])
    return f"is {found:,} B where {true:,} B are kept ({' '.join(f'{name}={n}' for name, n in letters.items())})"


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
    """Which rows a sum has too many or too few, or of another size; "" if no few of them explain it.

    kept: bytes by term; the others: the same without recomputation, and on one device.  Rows of one size
    with one fault are named together, as no sum tells them apart.
    """
    causes: list[tuple[str, str, int]] = []
    t = max((size // without_recomputation[term] for term, size in whole.items()), default=1)
    for term, size in without_recomputation.items():
        if term in kept:
            causes += [(term, "left out", -size), (term, "counted twice", size)]
            causes += [(term, "not divided by t", whole[term] - size)] if whole.get(term, size) != size else []
            if t > 1 and whole.get(term) == size:
                causes.append((term, "divided by t, but every rank has all of it", size // t - size))
            if "mask" in term:
                causes.append((term, "taken with 2 bytes an element (a mask has 1)", size))
        else:
            causes.append((term, f"counted, but recompute={recompute!r} drops it", size))
    alike: dict[tuple[str, int], list[str]] = {}
    for term, fault, size in causes:
        alike.setdefault((fault, size), []).append(term)
    fits = [
        _words_of_rows(terms, count, fault)
        for (fault, size), terms in alike.items()
        for count in range(1, len(terms) + 1)
        if count * size == difference
    ]
    if not fits:
        pairs = itertools.combinations(alike.items(), 2)
        fits = [
            f"{_words_of_rows(terms, 1, fault)} and {_words_of_rows(others, 1, other)}"
            for ((fault, size), terms), ((other, second), others) in pairs
            if size + second == difference
        ]
    return "; or ".join(fits)


def _words_of_rows(terms: Sequence[str], count: int, fault: str) -> str:
    """``count`` of these rows have a fault."""
    if len(terms) == 1:
        return f"{terms[0]} is {fault}"
    which = "these are" if count == len(terms) else "one of these is" if count == 1 else f"{count} of these are"
    return f"{which} {fault}: {', '.join(terms)}"
