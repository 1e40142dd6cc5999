"""Judge answers that are tables of bytes by term (exercises 1.1, 7.1 and 8.1).

A wrong number is explained by its ratio to the right one, such as "lacks the factor a", however it was computed.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch

from actmem_course.judge.compare import another_kind, check_whole_number
from actmem_course.judge.verdict import Fault, Wrong

#: A term's bytes in each case: those that were found, and the true ones.
Pairs = Sequence[tuple[int, int]]
#: Constant factors by which a wrong number may differ from the true one.
_CONSTANTS = {Fraction(n) for n in (1, 2, 4, 8, 16, 3, 6)} | {Fraction(1, n) for n in (1, 2, 4, 8, 16, 3, 6)}
#: A ratio is explained by at most so many letters; a square counts as two.
_MOST_LETTERS = 4


def checked_terms(answer: Any, names: Sequence[str]) -> dict[str, int]:
    """Check the form of a table that a learner's function returned, and return it.

    Args:
        answer: what the function returned.
        names: the terms that the table should have, such as "layer-norm 1 input".

    Returns: the table, with Python's ints as values.

    Raises: Wrong unless ``answer`` is a dict whose keys are exactly these terms and whose values are whole numbers.
    """
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
    """Raise Wrong if the bytes of any term are wrong.  The message describes the first two faults, each with its terms.

    Args:
        found: for each set of sizes, the learner's bytes by term.
        true: for each set of sizes, the right bytes by term.
        fault: takes a term and, for each set of sizes, the pair (found, true) of its bytes; returns a fault, whose
            symptom continues a sentence that begins with the term.
    """
    pairs_of = {term: [(f[term], t[term]) for f, t in zip(found, true)] for term in true[0]}
    faults: dict[Fault, list[str]] = {}
    for term, pairs in pairs_of.items():
        if any(f != t for f, t in pairs):
            faults.setdefault(fault(term, pairs), []).append(term)
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
    """Return a text with the first ``most`` names, and how many names follow them: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def explain_ratio(pairs: Pairs, sizes: Sequence[Mapping[str, int]], has: str) -> str:
    """Explain wrong values by their ratio to the true values, if it is a product of letters: "lacks the factor a".

    Args:
        pairs: for each set of sizes, the found value and the true value.
        sizes: the sets of sizes, each a dict with the value of each letter: {"s": 16, "b": 2, …}.
        has: the letters that are factors of the true value, such as "sbh".

    Returns: a text that continues a sentence that begins with the value's name.  If no such product explains the ratio,
        the text gives the found and the true value for one set of sizes.
    """
    powers = itertools.product(range(-2, 3), repeat=len(sizes[0]))
    near = [exponents for exponents in powers if sum(map(abs, exponents)) <= _MOST_LETTERS]
    for exponents in sorted(near, key=lambda e: sum(map(abs, e))):
        factors = [prod(Fraction(n) ** e for n, e in zip(letters.values(), exponents)) for letters in sizes]
        constants = {Fraction(f, t) / factor for (f, t), factor in zip(pairs, factors)}
        if len(constants) == 1 and constants <= _CONSTANTS:
            return _words(constants.pop(), dict(zip(sizes[0], exponents)), has)
    (found, true), letters = next((pair, z) for pair, z in zip(pairs, sizes) if pair[0] != pair[1])
    return f"is {found:,} B where {true:,} B are saved ({' '.join(f'{name}={n}' for name, n in letters.items())})"


def explain_sum(found: Sequence[int], sizes: Sequence[Mapping[str, int]], *terms: str) -> str:
    """Find the formula behind a learner's values, as a sum of terms: "10sbh + 24sbh/t".

    Args:
        found: the learner's value for each set of sizes.
        sizes: the sets of sizes, each a dict with the value of each letter: {"s": 16, "b": 2, …}.
        terms: the terms that the sum may have, such as "sbh/t" or "as²b".

    Returns: the sum; "" if no sum of these terms, with whole coefficients, gives the values.
    """
    spelled = [term.replace("s²", "ss").replace("t²", "tt").partition("/")[::2] for term in terms]
    values = [[prod(z[x] for x in over) / prod(z[x] for x in under) for over, under in spelled] for z in sizes]
    matrix, wanted = torch.tensor(values, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    counts = torch.linalg.lstsq(matrix, wanted[:, None]).solution.flatten().round()
    text = " + ".join(term if count == 1 else f"{int(count)}{term}" for term, count in zip(terms, counts) if count)
    return text if matrix.mv(counts).equal(wanted) else ""


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
