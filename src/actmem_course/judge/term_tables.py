"""Tables of bytes by term (1.1, 7.1, 8.1): a wrong number is explained by its ratio to the right one, however it was
computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch

from actmem_course.judge.compare import another_kind, check_whole_number
from actmem_course.judge.verdict import Fault, Wrong

#: Found and true bytes of a term, for each case.
Pairs = Sequence[tuple[int, int]]
_CONSTANTS = {Fraction(n) for n in (1, 2, 4, 8, 16, 3, 6)} | {Fraction(1, n) for n in (1, 2, 4, 8, 16, 3, 6)}
#: No more letters than this are wrong at once, a square counting as two.
_MOST_LETTERS = 4


def checked_terms(answer: Any, names: Sequence[str]) -> dict[str, int]:
    """A learner's bytes by name.  Raises Wrong unless these are the names, and whole numbers."""
    if not isinstance(answer, Mapping):
        raise another_kind("a dict of bytes by name", answer)
    missing, unknown = [n for n in names if n not in answer], [str(n) for n in answer if n not in names]
    if missing or unknown:
        lists = (("missing", missing), ("unknown", unknown))
        parts = "; ".join(f"{what} {', '.join(listing)}" for what, listing in lists if listing)
        raise Wrong(f"expected exactly the {len(names)} names: {parts}")
    return {term: check_whole_number(term, value) for term, value in answer.items()}


def check_terms(
    found: Sequence[Mapping[str, int]], true: Sequence[Mapping[str, int]], fault: Callable[[str, Pairs], Fault]
) -> None:
    """Raise Wrong with the first two things that are wrong, the terms that they are wrong in, and how many more are.

    found, true: bytes by term, of each case.  fault: what is wrong with a term, to follow its name, of its found and
    true bytes in each case.
    """
    pairs = {term: [(f[term], t[term]) for f, t in zip(found, true)] for term in true[0]}
    faults: dict[Fault, list[str]] = {}
    for term, each in pairs.items():
        if any(f != t for f, t in each):
            faults.setdefault(fault(term, each), []).append(term)
    if not faults:
        return
    symptoms = []
    for finding, terms in faults.items():
        others = f" (and so {listed(terms[1:])})" if terms[1:] else ""
        symptoms.append(f"{terms[0]} {finding.symptom}{others}")
    causes = {finding.cause: terms[0] for finding, terms in list(faults.items())[:2] if finding.cause}
    named = causes if len(causes) == 1 else [f"{term}: {cause}" for cause, term in causes.items()]
    if more := len(symptoms) - 2 if len(symptoms) > 2 else 0:
        symptoms[2:] = [f"{more} more mistake" if more == 1 else f"{more} more mistakes"]
    raise Wrong("; ".join(symptoms), cause="; ".join(named))


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def explain_ratio(pairs: Pairs, sizes: Sequence[Mapping[str, int]], has: str) -> str:
    """How found values relate to true ones, as a product of small powers of the letters: ``lacks the factor a``.

    pairs: found and true for each case.  sizes: the value of each letter in it.  has: the letters of the
    true value: what the found one lacks is one of them.
    """
    powers = itertools.product(range(-2, 3), repeat=len(sizes[0]))
    near = [exponents for exponents in powers if sum(map(abs, exponents)) <= _MOST_LETTERS]
    for exponents in sorted(near, key=lambda e: sum(map(abs, e))):
        constants = {Fraction(f, t) / _matmul(exponents, letters) for (f, t), letters in zip(pairs, sizes)}
        if len(constants) == 1 and constants <= _CONSTANTS:
            return _words(constants.pop(), dict(zip(sizes[0], exponents)), has)
    (found, true), letters = next((pair, z) for pair, z in zip(pairs, sizes) if pair[0] != pair[1])
    return f"is {found:,} B where {true:,} B are saved ({' '.join(f'{name}={n}' for name, n in letters.items())})"


def explain_sum(found: Sequence[int], sizes: Sequence[Mapping[str, int]], *terms: str) -> str:
    """Found values as a sum of terms, ``10sbh + 24sbh/t``; "" if they are none.  sizes: each letter's value in each
    case."""
    spelled = [term.replace("s²", "ss").replace("t²", "tt").partition("/")[::2] for term in terms]
    values = [[prod(z[x] for x in over) / prod(z[x] for x in under) for over, under in spelled] for z in sizes]
    made, wanted = torch.tensor(values, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    counts = torch.linalg.lstsq(made, wanted[:, None]).solution.flatten().round()
    said = " + ".join(term if count == 1 else f"{int(count)}{term}" for term, count in zip(terms, counts) if count)
    return said if made.mv(counts).equal(wanted) else ""


def _matmul(exponents: Sequence[int], letters: Mapping[str, int]) -> Fraction:
    result = Fraction(1)
    for size, exponent in zip(letters.values(), exponents):
        result *= Fraction(size) ** exponent
    return result


def _words(constant: Fraction, powers: Mapping[str, int], has: str) -> str:
    def named(sign: int, among: bool | None = None) -> list[str]:
        chosen = [(x, e) for x, e in powers.items() if e * sign > 0 and (among is None or (x in has) == among)]
        return [f"{x}²" if abs(e) == 2 else x for x, e in chosen]

    lacking, divided, surplus = named(-1, True), named(-1, False), named(1)
    parts = []
    if lacking:
        parts.append(f"lacks the factor {'·'.join(lacking)}")
    if divided:
        parts.append(f"is divided by {'·'.join(divided)}, which it has nothing to do with")
    if surplus:
        parts.append(f"has the extra factor {'·'.join(surplus)}")
    if constant != 1:
        parts.append(f"is {constant} of what is saved" if constant < 1 else f"is {constant} times what is saved")
    return " and ".join(parts)
