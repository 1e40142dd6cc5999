"""Find the formula of a model's bytes: run it in several sizes and solve for exact coefficients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

from actmem.config import ConfigError
from actmem.measure import factories
from actmem.measure.ledger import record

#: The highest power of each letter that can appear; of the others it is 1.
_POWERS = {"s": 2}
_EXPONENTS = {1: "", 2: "²", 3: "³"}
#: The order in which a term names its letters: as in the paper.
_ORDER = "lasbkhdfv"


def solve_formula(count: Callable[[dict[str, int]], int], start: Mapping[str, int]) -> dict[tuple[int, ...], Fraction]:
    """Coefficients of ``count`` as a polynomial in the letters of ``start``, by their exponents.

    count: bytes for given sizes.  start: the smallest size of each letter; others are multiples of it.
    Raises ConfigError if the bytes are no such polynomial, which further sizes show.
    """
    letters = list(start)
    axes = [[start[x] * m for m in range(1, _POWERS.get(x, 1) + 2)] for x in letters]
    values = {point: Fraction(count(dict(zip(letters, point)))) for point in product(*axes)}
    coefficients: dict[tuple[int, ...], Fraction] = {(): Fraction(0)}
    coefficients = _interpolate(values, axes)
    for factor in (4, 5):
        point = {x: start[x] * factor for x in letters}
        predicted = sum(c * prod(point[x] ** e for x, e in zip(letters, powers)) for powers, c in coefficients.items())
        if predicted != count(point):
            raise ConfigError(
                "solve",
                f"the bytes are no polynomial in {', '.join(letters)}: {point} is off by {count(point) - predicted}",
            )
    return {powers: c for powers, c in coefficients.items() if c}


def _interpolate(
    values: Mapping[tuple[int, ...], Fraction], axes: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], Fraction]:
    """Coefficients of the polynomial through ``values`` on a grid, one axis after the other."""
    if not axes:
        return {(): values[()]}
    first, rest = axes[0], axes[1:]
    columns = [_interpolate({p[1:]: v for p, v in values.items() if p[0] == x}, rest) for x in first]
    found = {}
    for powers in columns[0]:
        line = _line(first, [column[powers] for column in columns])
        found.update({(i, *powers): c for i, c in enumerate(line)})
    return found


def _line(xs: Sequence[int], ys: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, constant first, of the polynomial of least degree through the points."""
    total = [Fraction(0)] * len(xs)
    for i, x in enumerate(xs):
        term = [ys[i]]
        for j, other in enumerate(xs):
            if j != i:  # times (X - other) / (x - other)
                scale = Fraction(1, x - other)
                shifted = [Fraction(0), *term]
                term = [scale * (up - other * down) for up, down in zip(shifted, [*term, Fraction(0)])]
        total = [a + b for a, b in zip(total, term)]
    return total


def formula_text(coefficients: Mapping[tuple[int, ...], Fraction], letters: Sequence[str]) -> str:
    """A polynomial as ``34sbh + 5as²b``, the highest power first."""
    order = sorted(range(len(letters)), key=lambda i: _ORDER.find(letters[i]) % 99)
    terms = []
    for powers, c in sorted(coefficients.items(), key=lambda item: (-sum(item[0]), item[0])):
        name = "".join(f"{letters[i]}{_EXPONENTS[powers[i]]}" for i in order if powers[i])
        number = str(abs(c)) if c.denominator == 1 or not name else f"({abs(c)})"
        terms.append(("-" if c < 0 else "+", f"{'' if abs(c) == 1 and name else number}{name}"))
    text = " ".join(f"{sign} {term}" for sign, term in terms).removeprefix("+ ")
    return text or "0"


def solved_text(
    factory: Callable, letters: Sequence[str], sizes: Mapping[str, int], dtype: str = "", fake: bool = False
) -> str:
    """The formula of what the factory's model keeps, in the letters given; each must be a size that the factory takes."""
    letters = [letter.strip() for letter in letters]
    names = {names[0]: size for size, names in factories.SIZE_NAMES.items()}
    start: dict[str, int] = {}
    for letter in letters:
        if letter not in names or letters.count(letter) > 1:
            raise ConfigError("solve", f"must be different letters of {', '.join(names)}, got {','.join(letters)}")
        keyword = factories.keyword_of(factory, names[letter])
        if not keyword and letter not in "sb":
            raise ConfigError("solve", f"the factory takes none of {', '.join(factories.SIZE_NAMES[names[letter]])}")
        default = inspect.signature(factory).parameters[keyword].default if keyword else inspect.Parameter.empty
        start[letter] = sizes.get(names[letter], default if isinstance(default, int) else 2 if letter in "sb" else 0)
        if start[letter] < 1:
            raise ConfigError("solve", f"give the smallest {letter} by --{names[letter].replace('_', '-')}")

    def count(point: dict[str, int]) -> int:
        wanted: dict[str, Any] = {**sizes, **{names[letter]: value for letter, value in point.items()}}
        with factories.tensors_for(fake):
            model, inputs = factories.built_model(factory, wanted, dtype)
            with record(model) as ledger:
                output = factories.run_forward(model, inputs)
        del output
        return ledger.total_bytes

    return f"{formula_text(solve_formula(count, start), letters)} bytes"
