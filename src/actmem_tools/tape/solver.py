"""Solve a tape: one structure for all runs, and for each size in it the formula over the letters.

Sizes are drawn as primes times what the model asks for, so that no formula fits by accident.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, zip_longest

import numpy as np

from actmem.config import ConfigError
from actmem.rows import Row
from actmem_tools.tape.evaluate import (
    MAY_BE_ONE,
    MOST_ONES,
    Event,
    Formula,
    Make,
    Run,
    Tape,
    added,
    sizes_of,
    value,
    with_sizes,
)

#: Of what a letter is a multiple: a number times other letters.
Rules = Mapping[str, tuple[int, tuple[str, ...]]]
NO_RULES: Rules = {}
Record = Callable[[dict[str, int]], list[Event]]
#: A letter's own primes; the last are for letters of no known meaning.
_PRIMES = {
    "s": (5, 7, 11, 13, 17, 19),
    "b": (2, 3, 5, 7),
    "t": (2, 3, 5),
    "k": (2, 3, 5),
    "a": (2, 3, 5),
    "h": (2, 3, 5, 7),
    "n": (5, 7, 11),
    "x": (2, 3, 5),
    "c": (2, 3, 5, 7),
}
_OTHER_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29)
#: Letters of heads, ranks, experts and the like.
_COUNTS = "aktcnx"
#: How large sizes are in the run that checks formulas, the first at which a step needs no more bytes than that.
_LARGER, _MOST_BYTES = (256, 128, 64, 32), 64 << 20
#: Of what letters of known meaning are multiples: a number times letters, of which only those that are there count.
_USUAL = {"h": ("2", "a"), "a": ("", "k"), "d": ("2", "")}
#: How many runs are enough where the formulas are known already, the second where one is at the sizes asked for.
_FEW_RUNS, _FEW_AT = 3, 2
#: The most monomials of a formula, and the largest denominator of their coefficients.
_MOST_TERMS, _LARGEST_DENOMINATOR = 3, 720


class NoFormula(ConfigError):
    """A size, or the order of events, that no formula over the letters gives."""


def parsed_letters(
    text: str, more: str = ""
) -> tuple[list[str], dict[str, tuple[int, tuple[str, ...]]], dict[str, int]]:
    """Letters, what each is a multiple of, and those that are fixed, of a text such as ``s,b,h:2a,a,l=2``.

    more: further rules, as ``d:8,s:8``, for those of the letters that are there.  Of a letter all rules hold, and the
    usual one.
    """
    letters, given, fixed = [], [], {}
    for part in text.split(","):
        letter, number, others, size = _parsed_rule(part)
        if letter in letters or letter in fixed:
            raise ConfigError("letters", f"{letter} is there twice")
        if size:
            fixed[letter] = int(size)
            continue
        letters.append(letter)
        given.append((letter, number, others))
    if not letters:
        raise ConfigError("letters", "none of them is left to solve for")
    for letter, number, others in given:
        unknown = [x for x in others if x not in letters]
        if unknown or number.startswith("0"):
            raise ConfigError(
                "letters", f"{letter} can't be a multiple of {number}{others}: {', '.join(unknown) or number}"
            )
    built_in = [_parsed_rule(part)[:3] for part in more.split(",") if part]
    rules: dict[str, tuple[int, tuple[str, ...]]] = {letter: (1, ()) for letter in letters}
    for letter, number, others in [*given, *built_in, *((letter, *rule) for letter, rule in _USUAL.items())]:
        if letter in rules:
            before = rules[letter]
            both = dict.fromkeys((*before[1], *(x for x in others if x in letters)))
            rules[letter] = math.lcm(before[0], int(number or 1)), tuple(both)
    return letters, rules, fixed


def _parsed_rule(part: str) -> tuple[str, str, str, str]:
    """Letter, number, letters and fixed size of ``h:2a`` or ``l=2``, each "" where it isn't there."""
    found = re.fullmatch(r"\s*([^\W\d_])\s*(?::(\d*)([^\W\d_]*)|=(\d+))?\s*", part)
    if found is None:
        raise ConfigError("letters", f"must be letters as s, h:8, h:2a or l=2, got {part.strip()!r}")
    letter, number, others, size = found.groups(default="")
    return letter, number, others, size


def draw_sizes(
    letters: Sequence[str],
    rules: Rules,
    rng: random.Random,
    fixed: Mapping[str, int] = {},
    decks: dict | None = None,
    about: int = 0,
) -> dict[str, int]:
    """Sizes that keep the rules, with as few common factors as they allow.

    fixed: of some letters.  decks: what earlier draws have left of each letter's primes, so that each comes up.  about:
    where it is given, this large instead, but for what is a number of things, and a 16th of it for b.
    """
    decks = {} if decks is None else decks
    sizes: dict[str, int] = dict(fixed)
    waiting = [letter for letter in letters if letter not in fixed]
    while waiting:
        letter = next((x for x in waiting if all(y in sizes for y in rules.get(x, (1, ()))[1])), None)
        if letter is None:
            raise ConfigError("letters", f"{', '.join(waiting)} are multiples of each other")
        waiting.remove(letter)
        number, others = rules.get(letter, (1, ()))
        primes = _PRIMES.get(letter, _OTHER_PRIMES)
        if not decks.get(letter):
            decks[letter] = rng.sample(primes, len(primes))
        base = number * math.prod(sizes[x] for x in others)
        large = about // 16 if letter == "b" else about if letter not in _COUNTS else 0
        sizes[letter] = base * (large // base | 1 if large else decks[letter].pop())
    return {letter: sizes[letter] for letter in letters}


@dataclass(frozen=True)
class Runs:
    """Which runs a tape is solved from.

    Args:
        letters: of the formulas.
        rules: of what each letter is a multiple.
        fixed: sizes that don't vary.
        may_be_one: letters that are tried as 1 too, which can change the events.
        number: of runs for each list of events; by default enough to find any powers.
        at: sizes of one of the runs.
    """

    letters: Sequence[str]
    rules: Rules = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    may_be_one: Sequence[str] = MAY_BE_ONE
    number: int = 0
    at: Mapping[str, int] = field(default_factory=dict)

    def draw(self, rng: random.Random, ones: Sequence[str] = (), decks: dict | None = None) -> dict[str, int]:
        """Sizes of one run.  ones: letters that are 1.  decks: see ``draw_sizes``."""
        return draw_sizes(self.letters, self.rules, rng, {**self.fixed, **dict.fromkeys(ones, 1)}, decks)


def solve(record: Record, runs: Runs, known: list[Formula] | None = None) -> Tape:
    """The tape of what ``record`` does at given sizes; where letters of 1 change the events, with those as a variant.

    record: may set letters that others give.  known: formulas of tapes of the same code, which has run before, to
    which this one's are added: where each size has exactly one of them, a few runs are enough.  Raises NoFormula, which
    names the event and shows two sizes.
    """
    rng, at = random.Random(0), dict(runs.at)
    tape = Tape(tuple(runs.letters), [] if known is None else known, {})
    few = 0 if known is None else _FEW_AT if at else _FEW_RUNS
    if known is None:  # the first run of a process can hold more: caches fill, modules load
        record(runs.draw(rng))
    ones_at = tuple(sorted(letter for letter, size in at.items() if size == 1))
    done = [(at, record(at))] if at and not ones_at else []
    tape.variants[()] = _solved(record, tape, runs, rng, (), few, done)
    for count in range(1, MOST_ONES + 1):
        for ones in combinations(sorted(x for x in runs.letters if x in runs.may_be_one), count):
            sizes = at if at and ones == ones_at else runs.draw(rng, ones)
            try:
                events = record(sizes)
            except ConfigError:  # the model doesn't run there
                continue
            if not _same(tape, sizes, events):
                tape.variants[ones] = _solved(record, tape, runs, rng, ones, few, [(sizes, events)])
    return tape


def solve_rows(
    count: Callable[[dict[str, int]], list[Row]],
    letters: Sequence[str],
    rules: Rules = NO_RULES,
    fixed: Mapping[str, int] = {},
    num_runs: int = 0,
) -> dict[str, Formula]:
    """The formula of the bytes of each term's rows.  count: the rows at given sizes, always as many, in one order.

    fixed, num_runs: see ``Runs``; one run is enough of what depends on no letter.  Raises NoFormula, which names the
    row and shows two sizes.
    """

    def made(sizes: dict[str, int]) -> list[Event]:
        return [Make(i, row.bytes, row.term) for i, row in enumerate(count(sizes))]

    tape = solve(made, Runs(letters, rules, fixed, may_be_one=(), number=num_runs), known=[])
    found: dict[str, list[Formula]] = {}
    for event in tape.variants[()]:
        if isinstance(event, Make):
            found.setdefault(event.name, []).append(tape.formulas[event.bytes])
    return {term: added(formulas) for term, formulas in found.items()}


def check_larger(tape: Tape, record: Record, rules: Rules = NO_RULES) -> None:
    """One run at larger sizes: raises NoFormula where it isn't what the tape says, as where a size is rounded up to a
    multiple."""
    for about in _LARGER:
        sizes = draw_sizes(tape.letters, rules, random.Random(0), about=about)
        if tape.at(sizes).peak_bytes > _MOST_BYTES:
            continue
        try:
            events = record(sizes)
        except ConfigError:  # the model doesn't run there
            continue
        _check_events(tape, sizes, events)
        return


def _check_events(tape: Tape, sizes: dict[str, int], events: list[Event]) -> None:
    for told, ran in zip_longest(tape.events(sizes), events):
        if told != ran:
            by = [f"{_event_text(e)} {sizes_of(e) if e else ''}".rstrip() for e in (told, ran)]
            rule = f"formulas of smaller runs don't hold at {_text(sizes)}: {by[0]} by formula, {by[1]} in a run"
            raise NoFormula("letters", rule)


def _same(tape: Tape, sizes: dict[str, int], events: list[Event]) -> bool:
    try:
        return tape.events(sizes) == events
    except ConfigError:
        return False


def _solved(
    record: Record,
    tape: Tape,
    asked: Runs,
    rng: random.Random,
    ones: Sequence[str],
    few: int,
    done: Sequence[tuple[dict[str, int], list[Event]]],
) -> list[Event]:
    """Events with numbers of formulas, which are added to the tape's.  ones: letters that are 1.  done: first runs."""
    free = [letter for letter in tape.letters if letter not in (*asked.fixed, *ones)]
    runs = list(done)
    drawn = {tuple(sizes.values()) for sizes, _ in runs}
    decks: dict[str, list[int]] = {}
    most = asked.number or max(12, len(free) + 6)
    for _ in range(100):  # few letters have fewer different sizes
        sizes = asked.draw(rng, ones, decks)
        # A second run with the first one's b leaves its powers open, and later tapes take more runs than two.
        if tuple(sizes.values()) in drawn or (len(runs) == 1 and sizes.get("b") == runs[0][0].get("b") and "b" in free):
            continue
        if len(runs) >= most or (few and len(runs) >= few and _all_known(tape, runs, free)):
            break
        drawn.add(tuple(sizes.values()))
        runs.append((sizes, record(sizes)))
        _check_structure(runs[0], runs[-1])
    fit = _Fit([sizes for sizes, _ in runs], free, asked.rules)
    numbers = {formula: i for i, formula in enumerate(tape.formulas)}
    # What other letters of 1 had first: of several formulas that fit, the one that fits there too.
    known = _by_values(tape, runs)
    events = []
    for same in zip(*(events for _, events in runs)):
        solved = []
        for given in zip(*map(sizes_of, same)):
            if given in known:
                solved.append(known[given][0])
                continue
            formula = fit.formula(given)
            if formula is None and most < _MOST_TERMS + 2:  # too few runs for that many monomials
                return _solved(record, tape, replace(asked, number=_MOST_TERMS + 2), rng, ones, few, runs)
            if formula is None:
                what = getattr(same[0], "name", "") or f"{getattr(same[0], 'where', '')}: {getattr(same[0], 'op', '')}"
                shown = "; ".join(f"{_text(runs[i][0])}: {given[i]:,}" for i in (0, 1))
                raise NoFormula("letters", f"a size of {what} has no formula in {', '.join(free)}: {shown}")
            widened = tuple((c, tuple(powers.get(x, 0) for x in tape.letters)) for c, powers in formula)
            if widened not in numbers:
                numbers[widened] = len(tape.formulas)
                tape.formulas.append(widened)
            solved.append(numbers[widened])
        events.append(with_sizes(same[0], solved))
    return events


def _all_known(tape: Tape, runs: list[tuple[dict[str, int], list[Event]]], free: Sequence[str]) -> bool:
    """Whether each size of these runs has a formula on the tape, and two only where they differ in letters that are
    fixed.

    Not where two letters have one ratio in all runs, which a formula that isn't there could have.
    """
    if any(len({Fraction(sizes[x], sizes[y]) for sizes, _ in runs}) == 1 for x, y in combinations(free, 2)):
        return False
    places, known = [i for i, letter in enumerate(tape.letters) if letter in free], _by_values(tape, runs)

    def powers_of(number: int) -> frozenset:
        return frozenset(tuple(powers[i] for i in places) for _, powers in tape.formulas[number])

    wanted = {given for same in zip(*(events for _, events in runs)) for given in zip(*map(sizes_of, same))}
    return all(len({*map(powers_of, known.get(given, ()))}) == 1 for given in wanted)


def _by_values(tape: Tape, runs: Sequence[tuple[dict[str, int], list[Event]]]) -> dict[tuple[int, ...], list[int]]:
    """The numbers of the tape's formulas by what they give in these runs."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, formula in enumerate(tape.formulas):
        with suppress(ConfigError):
            found.setdefault(tuple(value(formula, list(sizes.values())) for sizes, _ in runs), []).append(i)
    return found


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{letter}={size}" for letter, size in sizes.items())


def _check_structure(*runs: tuple[dict[str, int], list[Event]]) -> None:
    """Raise NoFormula unless two runs have the same events, whatever their sizes."""
    for i, both in enumerate(zip_longest(*(events for _, events in runs))):
        if not _is_same(*both):
            what = [f"{_text(sizes)}: {_event_text(event)}" for (sizes, _), event in zip(runs, both)]
            raise NoFormula(
                "letters", f"what runs depends on the sizes or on values; event {i} at {what[0]}; at {what[1]}"
            )


def _is_same(one: Event | None, other: Event | None) -> bool:
    """Whether two events differ in sizes only."""
    if type(one) is not type(other) or one is None or other is None:
        return False
    sizes = sizes_of(one)
    return len(sizes) == len(sizes_of(other)) and with_sizes(other, sizes) == one


def _event_text(event: Event | None) -> str:
    if event is None:
        return "the end"
    name = getattr(event, "name", "") or (f"{event.where}: {event.op}" if isinstance(event, Run) else "")
    return f"{type(event).__name__} {name or getattr(event, 'number', '')}".strip()


def _powers_up_to(letters: int, highest: int) -> Iterator[tuple[int, ...]]:
    """Powers of so many letters that add up to ``highest`` at most."""
    for total in range(highest + 1):
        for some in combinations_with_replacement(range(letters), total):
            yield tuple(some.count(i) for i in range(letters))


class _Fit:
    """Formulas by what they give in all runs."""

    def __init__(self, runs: list[dict[str, int]], letters: Sequence[str], rules: Rules):
        self._runs, self._letters = runs, list(letters)
        logs = np.array([[1.0] + [math.log(run[x]) for x in letters] for run in runs])
        # A letter that letters before it give in all runs, as r = s·b·x, would leave the powers open: it gets none.
        ranks = [np.linalg.matrix_rank(logs[:, : i + 1]) for i in range(len(letters) + 1)]
        independent = np.diff(ranks, prepend=0) > 0
        self._logs = logs[:, independent]
        self._independent = [letter for letter, own in zip(letters, independent[1:]) if own]
        self._found: dict[tuple[int, ...], list | None] = {}
        # What may be a common factor: a letter, or a letter over one that divides it.
        self._factors = [{x: 1} for x in letters]
        self._factors += [{x: 1, y: -1} for x, (_, others) in rules.items() for y in others if {x, y} <= {*letters}]

    def formula(self, sizes: tuple[int, ...]) -> list[tuple[Fraction, dict[str, int]]] | None:
        if sizes not in self._found:
            self._found[sizes] = (self._monomial(sizes) or self._sum(sizes)) if any(sizes) else []
        return self._found[sizes]

    def _value(self, powers: Mapping[str, int], run: Mapping[str, int]) -> Fraction:
        return math.prod((Fraction(run[x]) ** e for x, e in powers.items()), start=Fraction(1))

    def _monomial(self, sizes):
        if min(sizes) <= 0:
            return None
        if len({*sizes}) == 1:  # one run can be enough of what depends on no letter
            return [(Fraction(sizes[0]), {})]
        logs = np.log(np.array(sizes, float))
        powers, *_ = np.linalg.lstsq(self._logs, logs, rcond=None)
        named = {x: e for x, p in zip(self._independent, powers[1:]) if (e := round(float(p)))}
        coefficients = {Fraction(size) / self._value(named, run) for size, run in zip(sizes, self._runs)}
        return [(coefficients.pop(), named)] if len(coefficients) == 1 else None

    def _sum(self, sizes):
        """Two or three monomials, after letters that divide every size, but for halves, are divided out.

        Small letters can divide all sizes by accident, so one or two are then put back.
        """
        left, common = [Fraction(size) for size in sizes], dict.fromkeys(self._letters, 0)
        for factor in (factor for factor in self._factors for _ in range(2)):
            divided = [size / self._value(factor, run) for size, run in zip(left, self._runs)]
            if all(x.denominator in (1, 2, 4, 8) for x in divided):
                left = divided
                for x, e in factor.items():
                    common[x] += e
        out = [x for x in self._letters if common[x] > 0]
        for some, candidates, most in self._attempts(out):
            again = dict.fromkeys(some, 1)
            more = [size * self._value(again, run) for size, run in zip(left, self._runs)]
            for found in self._sums_of(more, candidates, most):
                return self._with(found, {x: e - again.get(x, 0) for x, e in common.items()})
        return None

    def _attempts(self, out: list[str]) -> Iterator[tuple[tuple[str, ...], list[dict[str, int]], int]]:
        """Which letters are put back, the powers to try, and how many monomials, the most likely first."""
        simple = [{}, *self._factors]
        yield from ((some, simple, _MOST_TERMS) for n in range(3) for some in combinations(out, n))
        yield from ((some, self._candidates(3), 2) for some in ((), *((letter,) for letter in out)))
        yield (), self._candidates(2), _MOST_TERMS

    def _with(self, found, common: Mapping[str, int]):
        terms = [(c, {x: e for x in self._letters if (e := common[x] + powers.get(x, 0))}) for c, powers in found]
        return sorted(terms, key=lambda term: sorted(term[1].items()), reverse=True)

    def _candidates(self, highest: int) -> list[dict[str, int]]:
        small = [dict(zip(self._letters, p)) for p in _powers_up_to(len(self._letters), highest)]
        found = {tuple(sorted((x, e) for x, e in p.items() if e)) for p in small}
        for ratio in self._factors[len(self._letters) :]:
            for p in small:
                if sum(p.values()) < highest:
                    found.add(tuple(sorted((x, e) for x in self._letters if (e := p[x] + ratio.get(x, 0)))))
        return [dict(powers) for powers in sorted(found)]

    def _sums_of(
        self, left: list[Fraction], candidates: list[dict[str, int]], most: int
    ) -> Iterator[list[tuple[Fraction, dict[str, int]]]]:
        target = np.array([float(x) for x in left])
        columns = np.array([[float(self._value(p, run)) for p in candidates] for run in self._runs])
        scale = np.abs(columns).max(axis=0)
        unit = columns / scale
        # As many monomials as runs would give anything, and one fewer at times does by accident.
        for terms in range(2, min(most, len(candidates), len(self._runs) - 2) + 1):
            chosen = np.array(list(combinations(range(len(candidates)), terms)))
            for part in np.array_split(chosen, max(1, len(chosen) // 20_000)):
                some = unit[:, part].transpose(1, 0, 2)  # [sets, runs, terms]
                weights = np.linalg.pinv(some) @ target
                errors = np.abs((some @ weights[..., None])[..., 0] - target).max(axis=1)
                for i in np.flatnonzero(errors < 1e-7 * np.abs(target).max()):
                    exact = [
                        (Fraction(float(w / scale[j])).limit_denominator(_LARGEST_DENOMINATOR), candidates[j])
                        for w, j in zip(weights[i], part[i])
                    ]
                    if all(c for c, _ in exact) and all(
                        sum(c * self._value(p, run) for c, p in exact) == x for x, run in zip(left, self._runs)
                    ):
                        yield exact
