"""Solve a tape: run a model at several sizes, and find a formula for the bytes or FLOPs of every event.

The runs must have the same events, which differ only in their bytes and FLOPs.  A formula is over letters, the sizes
that the model is made with, such as s, b and h.  The value of a letter in a run is a random prime, times the numbers
that it must be a multiple of, so that no formula fits by accident.
"""

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

#: The type of rules for letters: for each letter the number and the other letters of whose product it is a multiple.
#: ``{"h": (2, ("a",))}`` makes h a multiple of 2·a.
Rules = Mapping[str, tuple[int, tuple[str, ...]]]
NO_RULES: Rules = {}
#: The type of a function that runs the model with these values of the letters, and returns the events.
Record = Callable[[dict[str, int]], list[Event]]
#: One run: the values of the letters, and the events.
_RecordedRun = tuple[dict[str, int], list[Event]]
#: The primes that are drawn for a letter of known meaning, and those for any other letter.
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
#: Letters that count things, as heads, ranks or experts: they stay small when other letters are drawn large.
_COUNTS = "aktcnx"
#: The run that checks the formulas has letters about as large as the first of these numbers at which a step needs no
#: more than the bytes that follow.
_LARGER, _MOST_BYTES = (256, 128, 64, 32), 64 << 20
#: What letters of known meaning are multiples of: a number times letters.  Letters that the model doesn't have are left
#: out.
_USUAL = {"h": ("2", "a"), "a": ("", "k"), "d": ("2", "")}
#: How many runs are enough if another tape has all formulas already: usually, and if one run has the letters asked for.
_FEW_RUNS, _FEW_AT = 3, 2
#: Primes that are drawn where one run is enough of a tape whose formulas another tape of a configuration's model has.
#: A wrong formula gives a size in that run only if a constant of the model has these primes as factors.
_RARE_PRIMES = {"s": (13, 17, 19), "b": (61, 67, 71)}
#: How often letters are drawn for a tape at most.  A model with few letters has few different draws, which then repeat.
_MOST_DRAWS = 100
#: The most monomials of a formula, and the largest denominator of their coefficients.
_MOST_TERMS, _LARGEST_DENOMINATOR = 3, 720


class NoFormula(ConfigError):
    """Error: some event's bytes or FLOPs have no formula over the letters, or the runs have different events."""


def parsed_letters(
    text: str, more: str = ""
) -> tuple[list[str], dict[str, tuple[int, tuple[str, ...]]], dict[str, int]]:
    """Return the letters and their rules of a text such as ``s,b,h:2a,a,l=2``.

    Args:
        text: letters, separated by commas.  ``h:2a`` makes h a multiple of 2·a, ``l=2`` makes l always 2.
        more: further rules, such as ``d:8,s:8``.  Rules of letters that ``text`` doesn't have are ignored.

    Returns: three items: the letters that vary; a dict from each of them to its rule (all given rules of the letter and
        its usual rule, such as an even d, are joined to one); and a dict of the fixed letters with their values.

    Raises: ConfigError on a text of another form, a letter that is there twice, or an unknown letter in a rule.
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
            rule = f"{letter} can't be a multiple of {number}{others}: {', '.join(unknown) or number}"
            raise ConfigError("letters", rule)
    built_in = [_parsed_rule(part)[:3] for part in more.split(",") if part]
    rules: dict[str, tuple[int, tuple[str, ...]]] = {letter: (1, ()) for letter in letters}
    for letter, number, others in [*given, *built_in, *((letter, *rule) for letter, rule in _USUAL.items())]:
        if letter in rules:
            before = rules[letter]
            both = dict.fromkeys((*before[1], *(x for x in others if x in letters)))
            rules[letter] = math.lcm(before[0], int(number or 1)), tuple(both)
    return letters, rules, fixed


def _parsed_rule(part: str) -> tuple[str, str, str, str]:
    """Split ``h:2a`` or ``l=2`` into four texts: the letter, the rule's number and its letters, and the fixed size.

    A text that isn't there is "".
    """
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
    """Choose the letters' values for one run: random values that keep the rules and share as few factors as possible.

    Args:
        letters: the letters, such as ``["s", "b", "h"]``.
        rules: the number and the letters by which each letter must be divisible.
        rng: draws a prime for each letter.
        fixed: letters with a given value, which isn't drawn.
        decks: a dict from letters to the primes that earlier draws have left.  This function changes the dict: a prime
            is drawn again only after all other primes of its letter have been drawn.
        about: if not 0, letters get about this value, and nothing is drawn for them; b gets a 16th of it.  Letters that
            count heads, ranks or experts are drawn and stay small.

    Returns: the value of each letter.
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
    """The runs from which a tape is solved: which letters vary, and how.

    Args:
        letters: the letters of the formulas, such as ``["s", "b", "h"]``.
        rules: the number and the letters by which each letter must be divisible, from ``parsed_letters``.
        fixed: letters whose value is the same in all runs.
        may_be_one: letters that are also tried with the value 1, because that can change the events.
        number: from how many runs each list of events is solved; 0 for as many as formulas with any powers need.
        at: the letters' values in the first run of a model's first tape, such as the sizes that the user asked for.
            All other runs have random values; if ``at`` is empty, the first run has random values too.
        only: letters that are 1 in all runs.  The tape then has just the list of events for such sizes, and ``solve``
            must be given the formulas of another tape as ``known``.  None for all lists of events (``Tape.variants``).
    """

    letters: Sequence[str]
    rules: Rules = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    may_be_one: Sequence[str] = MAY_BE_ONE
    number: int = 0
    at: Mapping[str, int] = field(default_factory=dict)
    only: tuple[str, ...] | None = None

    def draw(self, rng: random.Random, ones: Sequence[str] = (), decks: dict | None = None) -> dict[str, int]:
        """Choose the letters' values for one run.

        Args:
            rng: draws a prime for each letter.
            ones: letters that get the value 1.
            decks: a dict from letters to the primes that earlier draws have left, which this draw changes; None: all
                primes are left.
        """
        return draw_sizes(self.letters, self.rules, rng, {**self.fixed, **dict.fromkeys(ones, 1)}, decks)


def solve(record: Record, runs: Runs, known: list[Formula] | None = None) -> Tape:
    """Run a model at several sizes, and solve its tape: find a formula for every size on it.

    If other events happen when one or two letters are 1, the tape has those events as a variant (``Tape.variants``).

    Args:
        record: runs the model at given values of the letters and returns the events.  If the model itself decides a
            letter, such as r = s·b·x, ``record`` must write the letter's true value into the dict that it got.
        runs: the letters, and which runs are made.
        known: None for the first tape of a model; for the model's later tapes, the list of all formulas found so far,
            to which new formulas are appended.  If exactly one formula of the list fits each event in a few runs, no
            more runs are made.

    Raises: NoFormula, which names an event and shows it at two sizes.
    """
    rng, at = random.Random(0), dict(runs.at)
    tape = Tape(tuple(runs.letters), [] if known is None else known, {})
    enough_runs = 0 if known is None else _FEW_AT if at else _FEW_RUNS
    if known is None:  # the first run of a process can hold more: caches fill, modules load
        record(runs.draw(rng))
    elif known and at:
        numbers = {c.numerator for formula in known for c, _ in formula}
        decks = {x: [p for p in primes if all(n % p for n in numbers)] for x, primes in _RARE_PRIMES.items()}
        enough_runs, at = 1 if all(decks.values()) else _FEW_AT, runs.draw(rng, decks=decks)
    if runs.only is not None:
        first_run = {**at, **dict.fromkeys(runs.only, 1)}
        first_runs = [(first_run, record(first_run))]
        tape.variants[runs.only] = _solve_events(record, tape, runs, rng, runs.only, enough_runs, first_runs)
        return tape
    ones_at = tuple(sorted(letter for letter, size in at.items() if size == 1))
    first_runs = [(at, record(at))] if at and not ones_at else []
    tape.variants[()] = _solve_events(record, tape, runs, rng, (), enough_runs, first_runs)
    for count in range(1, MOST_ONES + 1):
        for ones in combinations(sorted(x for x in runs.letters if x in runs.may_be_one), count):
            sizes = {**at, **dict.fromkeys(ones, 1)} if at else runs.draw(rng, ones)
            try:
                events = record(sizes)
            except ConfigError:  # the model doesn't run there
                continue
            if not _tape_agrees(tape, sizes, events):
                tape.variants[ones] = _solve_events(record, tape, runs, rng, ones, enough_runs, [(sizes, events)])
    return tape


def solve_rows(
    count: Callable[[dict[str, int]], list[Row]],
    letters: Sequence[str],
    rules: Rules = NO_RULES,
    fixed: Mapping[str, int] = {},
    num_runs: int = 0,
) -> dict[str, Formula]:
    """Find formulas for the bytes of rows, such as a ledger's rows.

    Args:
        count: returns the rows at given values of the letters: always the same terms in the same order.
        letters: the letters of the formulas, such as ``["s", "b", "h"]``.
        rules: the number and the letters by which each letter must be divisible, from ``parsed_letters``.
        fixed: letters whose value is the same in all runs.
        num_runs: how many runs are made; 0 for as many as formulas with any powers need.  One run is enough for bytes
            that depend on no letter.

    Returns: a dict from each term to the formula of its bytes; rows with the same term are added up.

    Raises: NoFormula, which names a row and shows it at two sizes.
    """

    def made(sizes: dict[str, int]) -> list[Event]:
        return [Make(i, row.bytes, row.term) for i, row in enumerate(count(sizes))]

    tape = solve(made, Runs(letters, rules, fixed, may_be_one=(), number=num_runs), known=[])
    by_term: dict[str, list[Formula]] = {}
    for event in tape.variants[()]:
        if isinstance(event, Make):
            by_term.setdefault(event.name, []).append(tape.formulas[event.bytes])
    return {term: added(formulas) for term, formulas in by_term.items()}


def check_larger(tape: Tape, record: Record, rules: Rules = NO_RULES) -> None:
    """Check a tape by one run at larger sizes than those from which it was solved.

    The check finds, for example, that a kernel pads a size to a multiple of some number.

    Args:
        tape: the tape to check.
        record: the function from which ``solve`` solved the tape: it runs the model at given values of the letters and
            returns the events.
        rules: the number and the letters by which each letter must be divisible.

    Raises: NoFormula if the run has other events or sizes than the tape.
    """
    for about in _LARGER:
        sizes = draw_sizes(tape.letters, rules, random.Random(0), about=about)
        if tape.at(sizes).peak_bytes > _MOST_BYTES:
            continue
        try:
            events = record(sizes)
        except ConfigError:  # the model doesn't run there
            continue
        for expected, ran in zip_longest(tape.events(sizes), events):
            if expected != ran:
                by = [f"{_event_text(e)} {sizes_of(e) if e else ''}".rstrip() for e in (expected, ran)]
                rule = f"formulas of smaller runs don't hold at {_text(sizes)}: {by[0]} by formula, {by[1]} in a run"
                raise NoFormula("letters", rule)
        return


def _tape_agrees(tape: Tape, sizes: dict[str, int], events: list[Event]) -> bool:
    """Return whether the tape's events at these sizes are the events that ran there."""
    try:
        return tape.events(sizes) == events
    except ConfigError:
        return False


def _solve_events(
    record: Record,
    tape: Tape,
    asked: Runs,
    rng: random.Random,
    ones: Sequence[str],
    enough_runs: int,
    first_runs: Sequence[_RecordedRun],
) -> list[Event]:
    """Solve one list of events.

    Args:
        record: runs the model.
        tape: the tape, to whose formulas new ones are appended.
        asked: the letters, and which runs are made.
        rng: draws the letters of each run.
        ones: letters that are 1 in these runs.
        enough_runs: after how many runs no more are made if the tape has a formula for every size already; 0: always
            make all runs.
        first_runs: runs that were made before.

    Returns: the events, with indices of the tape's formulas in place of sizes.
    """
    letters = [letter for letter in tape.letters if letter not in (*asked.fixed, *ones)]
    runs = list(first_runs)
    drawn = {tuple(sizes.values()) for sizes, _ in runs}
    decks: dict[str, list[int]] = {}
    num_runs = asked.number or max(12, len(letters) + 6)
    for _ in range(_MOST_DRAWS):
        sizes = asked.draw(rng, ones, decks)
        # If the first two runs had the same b, its powers would stay open, and later tapes would take more runs.
        same_b = len(runs) == 1 and "b" in letters and sizes.get("b") == runs[0][0].get("b")
        if tuple(sizes.values()) in drawn or same_b:
            continue
        if len(runs) >= num_runs or (0 < enough_runs <= len(runs) and _all_known(tape, runs, letters)):
            break
        drawn.add(tuple(sizes.values()))
        runs.append((sizes, record(sizes)))
        _check_structure(runs[0], runs[-1])
    fit = _Fit([sizes for sizes, _ in runs], letters, asked.rules)
    numbers = {formula: i for i, formula in enumerate(tape.formulas)}
    # Several formulas can fit these runs.  Prefer one that the tape has: it also fits the variants solved before.
    known = _by_values(tape, runs)
    events = []
    for event_of_each_run in zip(*(events for _, events in runs)):
        solved = []
        for size_in_each_run in zip(*map(sizes_of, event_of_each_run)):
            if size_in_each_run in known:
                solved.append(known[size_in_each_run][0])
                continue
            formula = fit.formula(size_in_each_run)
            if formula is None and num_runs < _MOST_TERMS + 2:  # too few runs for that many monomials
                return _solve_events(record, tape, replace(asked, number=_MOST_TERMS + 2), rng, ones, enough_runs, runs)
            if formula is None:
                shown = "; ".join(f"{_text(runs[i][0])}: {size_in_each_run[i]:,}" for i in (0, 1))
                what = f"a size of {_event_name(event_of_each_run[0])}"
                raise NoFormula("letters", f"{what} has no formula in {', '.join(letters)}: {shown}")
            with_all_letters = tuple((c, tuple(powers.get(x, 0) for x in tape.letters)) for c, powers in formula)
            if with_all_letters not in numbers:
                numbers[with_all_letters] = len(tape.formulas)
                tape.formulas.append(with_all_letters)
            solved.append(numbers[with_all_letters])
        events.append(with_sizes(event_of_each_run[0], solved))
    return events


def _all_known(tape: Tape, runs: list[_RecordedRun], letters: Sequence[str]) -> bool:
    """Return whether the tape has a formula for each size of these runs, and never two that differ in varied letters.

    A size that is the same in several runs needs no formula: it depends on no letter.  The result is False if two
    letters have the same ratio in several runs: then an unknown formula could give the same values.
    """
    few = min(2, len(runs))
    if any(len({Fraction(sizes[x], sizes[y]) for sizes, _ in runs}) < few for x, y in combinations(letters, 2)):
        return False
    places, known = [i for i, letter in enumerate(tape.letters) if letter in letters], _by_values(tape, runs)

    def powers_of(number: int) -> frozenset:
        return frozenset(tuple(powers[i] for i in places) for _, powers in tape.formulas[number])

    wanted = {sizes for versions in zip(*(events for _, events in runs)) for sizes in zip(*map(sizes_of, versions))}
    return all(len({*sizes}) < few or len({*map(powers_of, known.get(sizes, ()))}) == 1 for sizes in wanted)


def _by_values(tape: Tape, runs: Sequence[_RecordedRun]) -> dict[tuple[int, ...], list[int]]:
    """Return the tape's formulas by their values: a dict from a tuple, one value for each run, to formulas' indices."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for i, formula in enumerate(tape.formulas):
        with suppress(ConfigError):
            numbers.setdefault(tuple(value(formula, list(sizes.values())) for sizes, _ in runs), []).append(i)
    return numbers


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{letter}={size}" for letter, size in sizes.items())


def _check_structure(*runs: _RecordedRun) -> None:
    """Raise NoFormula unless two runs have the same events, apart from the events' sizes."""
    for i, both in enumerate(zip_longest(*(events for _, events in runs))):
        if not _differ_in_sizes_only(*both):
            what = [f"{_text(sizes)}: {_event_text(event)}" for (sizes, _), event in zip(runs, both)]
            rule = f"what runs depends on the sizes or on values; event {i} at {what[0]}; at {what[1]}"
            raise NoFormula("letters", rule)


def _differ_in_sizes_only(first: Event | None, second: Event | None) -> bool:
    if type(first) is not type(second) or first is None or second is None:
        return False
    sizes = sizes_of(first)
    return len(sizes) == len(sizes_of(second)) and with_sizes(second, sizes) == first


def _event_name(event: Event) -> str:
    return getattr(event, "name", "") or (f"{event.where}: {event.op}" if isinstance(event, Run) else "")


def _event_text(event: Event | None) -> str:
    if event is None:
        return "the end"
    return f"{type(event).__name__} {_event_name(event) or getattr(event, 'number', '')}".strip()


def _powers_up_to(num_letters: int, highest: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of ``num_letters`` powers whose sum is at most ``highest``."""
    for total in range(highest + 1):
        for letters in combinations_with_replacement(range(num_letters), total):
            yield tuple(letters.count(i) for i in range(num_letters))


class _Fit:
    """Finds the formula that gives a size's values in all runs.

    In this class powers are a dict from letters, such as ``{"s": 1, "h": -1}`` for s/h.

    Args:
        runs: the values of the letters in each run.
        letters: the letters that a formula may have.
        rules: the number and the letters by which each letter is divisible: a formula may have a letter divided by one
            of these.
    """

    def __init__(self, runs: list[dict[str, int]], letters: Sequence[str], rules: Rules):
        self._runs, self._letters, self._rules = runs, list(letters), rules
        logs = np.array([[1.0] + [math.log(run[x]) for x in letters] for run in runs])
        # A letter that letters before it give in all runs, as r = s·b·x, would leave the powers open: it gets none.
        ranks = [np.linalg.matrix_rank(logs[:, : i + 1]) for i in range(len(letters) + 1)]
        independent = np.diff(ranks, prepend=0) > 0
        self._logs = logs[:, independent]
        self._independent = [letter for letter, own in zip(letters, independent[1:]) if own]
        self._found: dict[tuple[int, ...], list | None] = {}
        # What can be a common factor of all monomials: a letter, or a letter over one that divides it.
        self._factors = [{x: 1} for x in letters]
        self._factors += [{x: 1, y: -1} for x, (_, others) in rules.items() for y in others if {x, y} <= {*letters}]

    def formula(self, sizes: tuple[int, ...]) -> list[tuple[Fraction, dict[str, int]]] | None:
        """Return monomials (coefficient, powers) whose sum is ``sizes[i]`` in run i; None if there are none."""
        if sizes not in self._found:
            self._found[sizes] = (self._monomial(sizes) or self._sum(sizes)) if any(sizes) else []
        return self._found[sizes]

    def _value(self, powers: Mapping[str, int], run: Mapping[str, int]) -> Fraction:
        return math.prod((Fraction(run[x]) ** e for x, e in powers.items()), start=Fraction(1))

    def _monomial(self, sizes):
        """Find one monomial: its powers by least squares of the logarithms, and its exact coefficient."""
        if min(sizes) <= 0:
            return None
        if len({*sizes}) == 1:  # one run can be enough of what depends on no letter
            return [(Fraction(sizes[0]), {})]
        powers, *_ = np.linalg.lstsq(self._logs, np.log(np.array(sizes, float)), rcond=None)
        rounded = {x: e for x, p in zip(self._independent, powers[1:]) if (e := round(float(p)))}
        coefficients = {Fraction(size) / self._value(rounded, run) for size, run in zip(sizes, self._runs)}
        return [(coefficients.pop(), rounded)] if len(coefficients) == 1 else None

    def _sum(self, sizes):
        """Find a sum of two or three monomials.

        First every factor that divides all sizes (halves, quarters and eighths may be left) is divided out, up to
        twice, as a factor of all monomials.  A small letter can divide all sizes by accident, so the search is repeated
        with some letters multiplied in again.
        """
        quotients, common = [Fraction(size) for size in sizes], dict.fromkeys(self._letters, 0)
        for factor in (factor for factor in self._factors for _ in range(2)):
            divided = [size / self._value(factor, run) for size, run in zip(quotients, self._runs)]
            if all(x.denominator in (1, 2, 4, 8) for x in divided):
                quotients = divided
                for x, e in factor.items():
                    common[x] += e
        for restored, candidates, most_terms in self._attempts([x for x in self._letters if common[x] > 0]):
            factor = dict.fromkeys(restored, 1)
            targets = [size * self._value(factor, run) for size, run in zip(quotients, self._runs)]
            for monomials in self._sums_of(targets, candidates, most_terms):
                return self._times(monomials, {x: e - factor.get(x, 0) for x, e in common.items()})
        return None

    def _attempts(self, divided_out: list[str]) -> Iterator[tuple[tuple[str, ...], list[dict[str, int]], int]]:
        """Yield the searches to try, the most likely first.

        Yields: the letters that are multiplied in again, the powers that a monomial may have, and the largest number of
            monomials.
        """
        simple = [{}, *self._factors]
        yield from ((restored, simple, _MOST_TERMS) for n in range(3) for restored in combinations(divided_out, n))
        yield from ((restored, self._candidates(3), 2) for restored in ((), *((letter,) for letter in divided_out)))
        yield (), self._candidates(2), _MOST_TERMS

    def _times(self, monomials, common: Mapping[str, int]):
        """Multiply monomials by the powers in ``common``, and sort them."""
        terms = [(c, {x: e for x in self._letters if (e := common[x] + powers.get(x, 0))}) for c, powers in monomials]
        return sorted(terms, key=lambda term: sorted(term[1].items()), reverse=True)

    def _candidates(self, highest: int) -> list[dict[str, int]]:
        """List powers that add up to at most ``highest``, also with a ratio of two letters in place of one."""
        small = [dict(zip(self._letters, p)) for p in _powers_up_to(len(self._letters), highest)]
        candidates = {tuple(sorted((x, e) for x, e in p.items() if e)) for p in small}
        for ratio in self._factors[len(self._letters) :]:
            for p in small:
                if sum(p.values()) < highest:
                    candidates.add(tuple(sorted((x, e) for x in self._letters if (e := p[x] + ratio.get(x, 0)))))
        return [dict(powers) for powers in sorted(candidates)]

    def _sums_of(
        self, targets: list[Fraction], candidates: list[dict[str, int]], most_terms: int
    ) -> Iterator[list[tuple[Fraction, dict[str, int]]]]:
        """Yield the sums of 2 to ``most_terms`` monomials that equal the target in each run.

        They are found by least squares, and checked exactly.

        Args:
            targets: the sum's value in each run.
            candidates: the powers that a monomial may have.
            most_terms: the largest number of monomials.
        """
        target = np.array([float(x) for x in targets])
        columns = np.array([[float(self._value(p, run)) for p in candidates] for run in self._runs])
        # A letter that is a multiple of 256 counts chunks of 256: of these the coefficients are simple numbers.
        units = [self._value(p, {x: self._rules.get(x, (1, ()))[0] for x in p}) for p in candidates]
        scale = np.abs(columns).max(axis=0)
        unit = columns / scale
        # As many monomials as runs would fit any sizes, and one fewer fits some sizes by accident.
        for terms in range(2, min(most_terms, len(candidates), len(self._runs) - 2) + 1):
            sets = np.array(list(combinations(range(len(candidates)), terms)))
            for part in np.array_split(sets, max(1, len(sets) // 20_000)):
                matrices = unit[:, part].transpose(1, 0, 2)  # [sets, runs, terms]
                weights = np.linalg.pinv(matrices) @ target
                errors = np.abs((matrices @ weights[..., None])[..., 0] - target).max(axis=1)
                for i in np.flatnonzero(errors < 1e-7 * np.abs(target).max()):
                    exact = [
                        (
                            Fraction(float(w / scale[j] * units[j])).limit_denominator(_LARGEST_DENOMINATOR) / units[j],
                            candidates[j],
                        )
                        for w, j in zip(weights[i], part[i])
                    ]
                    if all(c for c, _ in exact) and all(
                        sum(c * self._value(p, run) for c, p in exact) == x for x, run in zip(targets, self._runs)
                    ):
                        yield exact
