"""A tape: the events of one forward and backward pass in order, their sizes as formulas.

Read at any sizes, without torch.

A formula is a sum of monomials, each an exact coefficient and a power of every letter.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from math import prod

from actmem.config import ConfigError, check_size
from actmem.rows import Row, merge

#: One monomial: its coefficient, and the power of each letter.
Monomial = tuple[Fraction, tuple[int, ...]]
Formula = tuple[Monomial, ...]
#: What begins at the mark of that name.
FORWARD, BACKWARD = "forward", "backward"
#: The name of weights' gradients on the tape of a step's first microbatch.
GRADIENTS = "gradients"
#: The number of the formula that is 0 at all sizes.
NOTHING = -1
_POWER_SIGNS = {1: "", 2: "²", 3: "³"}
#: Letters that may be 1, and how many together.  A size of 1 can change which tensors are copies, so it has events of
#: its own.
MAY_BE_ONE, MOST_ONES = ("b", "a", "k"), 2


@dataclass(frozen=True)
class Make:
    """A new storage.

    number: its place among the tape's storages, in the order in which they were made.
    name: its term, or the module or backward's node and the operation.
    """

    number: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Resize:
    """A storage that has other bytes from now on."""

    number: int
    bytes: int


@dataclass(frozen=True)
class Free:
    """The end of a storage."""

    number: int


@dataclass(frozen=True)
class Run:
    """One operation, done.

    flops: if it is a matmul; of causal attention half.
    read, written: bytes of each tensor.
    """

    op: str
    where: str
    flops: int
    read: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True)
class Mark:
    """A place in the tape: ``FORWARD``, ``BACKWARD``, or what whoever recorded it wanted to find again."""

    name: str


@dataclass(frozen=True)
class Gradient:
    """A weight's gradient is there, and is added to that of an earlier microbatch.  In the first it stays.

    number: of the storage that it lies in; -1 if the first would be a copy.  bytes: of what stays.
    """

    number: int
    bytes: int


Event = Make | Resize | Free | Run | Mark | Gradient
EVENT_KINDS: tuple[type, ...] = (Make, Resize, Free, Run, Mark, Gradient)


def sizes_of(event: Event) -> list[int]:
    """The fields of an event that are sizes: on a tape numbers of formulas, in a run bytes or FLOPs."""
    if isinstance(event, (Make, Resize, Gradient)):
        return [event.bytes]
    return [event.flops, *event.read, *event.written] if isinstance(event, Run) else []


def used_in(events: Iterable[Event]) -> set[int]:
    """The numbers of the formulas of a tape's events."""
    return {i for event in events for i in sizes_of(event)}


def value(formula: Formula, sizes: Sequence[int]) -> int:
    """A formula at these sizes.  Raises ConfigError if that is no whole number."""
    total: Fraction | int = 0
    for coefficient, powers in formula:
        above = coefficient.numerator * prod(x**e for x, e in zip(sizes, powers) if e > 0)
        below = coefficient.denominator * prod(x**-e for x, e in zip(sizes, powers) if e < 0)
        total += Fraction(above, below) if below > 1 else above
    if isinstance(total, Fraction) and total.denominator != 1:
        raise ConfigError("at", f"the sizes don't divide each other as the model's must: {total} bytes")
    return int(total)


def parsed_sizes(text: str) -> dict[str, int]:
    """Sizes of a text such as ``s=200,b=3``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        letter, equals, number = (x.strip() for x in part.partition("="))
        if not equals or not re.fullmatch(r"[0-9]{1,15}", number) or letter in sizes:
            raise ConfigError("at", f"must be sizes as s=200,b=3, each once, got {part.strip()!r}")
        sizes[letter] = int(number)
    return sizes


def added(formulas: Iterable[Formula]) -> Formula:
    """The sum of formulas over the same letters."""
    sums: dict[tuple[int, ...], Fraction] = {}
    for formula in formulas:
        for coefficient, powers in formula:
            sums[powers] = sums.get(powers, Fraction(0)) + coefficient
    return tuple((sums[powers], powers) for powers in sorted(sums) if sums[powers])


def formula_text(formula: Formula, letters: Sequence[str]) -> str:
    """A formula as ``34sbh + 5as²b``, the highest power first, letters in the paper's order."""
    order = sorted(range(len(letters)), key=lambda i: "lasbkhdfv".find(letters[i]) % 99)
    text = ""
    for coefficient, powers in sorted(formula, key=lambda term: (-sum(term[1]), term[1])):
        name = "".join(letters[i] + _POWER_SIGNS.get(powers[i], f"^{powers[i]}") for i in order if powers[i])
        size = abs(coefficient)
        number = str(size) if size.denominator == 1 or not name else f"({size})"
        text += f" {'-' if coefficient < 0 else '+'} {'' if size == 1 and name else number}{name}"
    return text.removeprefix(" + ").strip() or "0"


@dataclass
class Reading:
    """What a tape says at one set of sizes.  Bytes count all but weights, their gradients, buffers and inputs.

    kept_bytes: alive when forward ends.  peak_bytes: the most alive after any operation of backward.
    peak_rows: what is alive then.  flops, moved_bytes: of FORWARD and of BACKWARD.
    """

    kept_bytes: int = 0
    peak_bytes: int = 0
    kept_rows: list[Row] = field(default_factory=list)
    peak_rows: list[Row] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Tape:
    """Events whose sizes are numbers of ``formulas``.

    variants: by the letters that are 1, sorted; () where none is.  A set that isn't there has the events of the largest
    set in it that is: the runs were the same.
    """

    letters: tuple[str, ...]
    formulas: list[Formula]
    variants: dict[tuple[str, ...], list[Event]]

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raises ConfigError on missing, unknown or impossible sizes."""
        for letter in sizes:
            if letter not in self.letters:
                raise ConfigError("at", f"the tape has no {letter}, only {', '.join(self.letters)}")
        for letter in self.letters:
            if letter not in sizes:
                raise ConfigError("at", f"{letter} is missing: the tape needs {', '.join(self.letters)}")
            check_size(letter, sizes[letter], largest=2**40)
        ones = {letter for letter in self.letters if sizes[letter] == 1}
        if len(ones) > MOST_ONES or not ones <= {*MAY_BE_ONE}:
            few = f"at most {MOST_ONES} of {', '.join(MAY_BE_ONE)} may be 1"
            raise ConfigError("at", f"{few}: other sizes of 1 weren't recorded, and can run otherwise")

    def events(self, sizes: Mapping[str, int]) -> list[Event]:
        """The events at these sizes, in bytes.  Raises ConfigError on missing, unknown or impossible sizes."""
        self.check(sizes)
        chosen = self.variants[self.ones(sizes)]
        values = self.values(used_in(chosen), sizes)
        return [with_sizes(event, [values[i] for i in sizes_of(event)]) for event in chosen]

    def ones(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Which of ``variants`` has the events for these sizes."""
        ones = sorted(letter for letter in MAY_BE_ONE if sizes.get(letter) == 1)
        subsets = (subset for n in range(len(ones), -1, -1) for subset in combinations(ones, n))
        return next(subset for subset in subsets if subset in self.variants)

    def values(self, used: Iterable[int], sizes: Mapping[str, int]) -> dict[int, int]:
        """The values of formulas at sizes, which aren't checked, by their numbers."""
        own = [sizes[letter] for letter in self.letters]
        return {NOTHING: 0, **{i: value(self.formulas[i], own) for i in used}}

    def kept_formula(self) -> Formula:
        """``kept_bytes`` of a reading as a formula, for sizes none of which is 1."""
        nothing = dict.fromkeys(range(len(self.formulas)), 0)
        alive = next(alive for event, _, alive in moments(self.variants[()], nothing) if event == Mark(BACKWARD))
        return added(self.formulas[made.bytes] for made in alive.values())

    def at(self, sizes: Mapping[str, int]) -> Reading:
        """Everything that the tape says at these sizes."""
        return read_events(self.events(sizes))

    def to_json(self) -> str:
        """The tape as text; ``from_json`` reads it."""
        return json.dumps(packed({"": self}), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Tape:
        """Raises ConfigError on anything but a tape."""
        try:
            tape = unpacked(json.loads(text), "")
            if not all(len(powers) == len(tape.letters) for formula in tape.formulas for _, powers in formula):
                raise ValueError("a monomial needs a power of each letter")
            numbers = range(len(tape.formulas))
            if not all(i in numbers for events in tape.variants.values() for event in events for i in sizes_of(event)):
                raise ValueError("a size is no formula's number")
            return tape
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ConfigError("tape", f"this is no tape: {type(error).__name__}: {error}") from error


def packed(tapes: Mapping[str, Tape]) -> dict:
    """Tapes over the same letters as JSON has them, by name, with their formulas and words once for all."""
    formulas: dict[Formula, int] = {}
    words: dict[str, int] = {}

    def fields(event: Event) -> list:
        values = vars(event).values()
        return [
            EVENT_KINDS.index(type(event)),
            *(words.setdefault(x, len(words)) if isinstance(x, str) else x for x in values),
        ]

    events_of = {}
    for name, tape in tapes.items():
        numbers = [formulas.setdefault(formula, len(formulas)) for formula in tape.formulas]
        events_of[name] = {
            ",".join(ones): [fields(with_sizes(event, [numbers[i] for i in sizes_of(event)])) for event in events]
            for ones, events in tape.variants.items()
        }
    lists = [[[str(c), *powers] for c, powers in formula] for formula in formulas]
    letters = next(iter(tapes.values())).letters
    return {"letters": letters, "formulas": lists, "words": list(words), "tapes": events_of}


def unpacked(tapes: Mapping, name: str) -> Tape:
    """One of the tapes that ``packed`` wrote."""
    words = tapes["words"]

    def event(fields: list) -> Event:
        kind = EVENT_KINDS[fields[0]]
        types = zip(kind.__annotations__.values(), fields[1:], strict=True)
        return kind(*(words[x] if t == "str" else tuple(x) if t != "int" else x for t, x in types))

    def monomial(coefficient: str, *powers: int) -> Monomial:
        # A stranger's file could have numbers that take forever.
        if not re.fullmatch(r"-?\d{1,30}(/\d{1,30})?", coefficient) or any(abs(power) > 9 for power in powers):
            raise ValueError(f"{coefficient[:40]} of powers {powers} is no monomial")
        return Fraction(coefficient), powers

    formulas = [tuple(monomial(*fields) for fields in formula) for formula in tapes["formulas"]]
    variants = {
        tuple(ones.split(",")) if ones else (): [event(fields) for fields in events]
        for ones, events in tapes["tapes"][name].items()
    }
    return Tape(tuple(tapes["letters"]), formulas, {(): variants.pop(()), **variants})


def with_sizes(event: Event, sizes: Iterable[int]) -> Event:
    """The event with other sizes."""
    new = tuple(sizes)
    if isinstance(event, Make):
        return Make(event.number, new[0], event.name)
    if isinstance(event, (Resize, Gradient)):
        return type(event)(event.number, new[0])
    if isinstance(event, Run):
        written = 1 + len(event.read)
        return Run(event.op, event.where, new[0], new[1:written], new[written:])
    return event


def moments(
    events: Iterable[Event], values: Mapping[int, int] | None = None
) -> Iterator[tuple[Event, int, dict[int, Make]]]:
    """Each event, the bytes alive after it, and what is alive by its number (one dict for all).

    values: of the numbers that are sizes in the events; None if they are bytes.
    """
    alive: dict[int, Make] = {}
    live = 0
    for event in events:
        if isinstance(event, Make):
            alive[event.number] = event
            live += event.bytes if values is None else values[event.bytes]
        elif isinstance(event, (Free, Resize)) and event.number in alive:
            made = alive.pop(event.number)
            live -= made.bytes if values is None else values[made.bytes]
            if isinstance(event, Resize):
                alive[event.number] = Make(made.number, event.bytes, made.name)
                live += event.bytes if values is None else values[event.bytes]
        yield event, live, alive


def first_microbatch(events: Iterable[Event]) -> list[Event]:
    """The events where no gradient is there before: the first of each weight stays, as ``GRADIENTS``."""
    found: list[Event] = []
    gone: set[int] = set()
    for event in events:
        if isinstance(event, Gradient):
            if event.number not in gone:
                found.append(Make(-1 - len(found), event.bytes, GRADIENTS))
            if event.number >= 0 and event.number not in gone:
                found.insert(-1, Free(event.number))
                gone.add(event.number)
        elif not (isinstance(event, (Free, Resize)) and event.number in gone):
            found.append(event)
    return found


def alive_after(events: Sequence[Event], place: int) -> dict[int, Make]:
    """What is alive after the event at that place, by its number; sizes as the events have them."""
    *_, (_, _, alive) = moments(events[: place + 1])
    return alive


def read_events(events: Sequence[Event]) -> Reading:
    """What events in bytes add up to."""
    reading, phase, fullest = Reading(), FORWARD, None
    for i, (event, live, alive) in enumerate(moments(events)):
        if isinstance(event, Mark) and event.name in (FORWARD, BACKWARD):
            phase = event.name
            if phase == BACKWARD:
                reading.kept_bytes = live
                reading.kept_rows = _rows(alive)
        elif isinstance(event, Run):
            reading.flops[phase] += event.flops
            reading.moved_bytes[phase] += sum(event.read) + sum(event.written)
            if phase == BACKWARD and live > reading.peak_bytes:
                reading.peak_bytes, fullest = live, i
    if fullest is not None:
        reading.peak_rows = _rows(alive_after(events, fullest))
    return reading


def _rows(alive: Mapping[int, Make]) -> list[Row]:
    return merge(Row(made.name, made.bytes) for made in alive.values())
