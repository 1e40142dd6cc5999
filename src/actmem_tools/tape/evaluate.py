"""What a tape is, and how to read memory and FLOPs off it at any sizes, without torch.

A tape lists the events of one forward and backward pass in order: storages that are made and freed, operations that
run.  The size of an event, in bytes or FLOPs, is a formula over letters such as s, b and h.  A formula is a sum of
monomials such as 34sbh; each has an exact coefficient and a power for every letter.
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
#: Names of the marks at which the forward and the backward pass begin.
FORWARD, BACKWARD = "forward", "backward"
#: The name of the storages of weights' gradients where a step's first microbatch makes them.
GRADIENTS = "gradients"
#: Stands for the number of a formula that is 0 at all sizes.
NOTHING = -1
_POWER_SIGNS = {1: "", 2: "²", 3: "³"}
#: Letters that may be 1, and how many of them may be 1 together.  If a letter is 1, a tensor may need no copy where it
#: otherwise needs one, so a tape has another list of events for that case.
MAY_BE_ONE, MOST_ONES = ("b", "a", "k"), 2


@dataclass(frozen=True)
class Make:
    """Event: a storage is made.

    Attributes:
        number: the storage's number; storages are numbered in the order in which they are made.
        bytes: the storage's size.
        name: the ledger's name of a tensor that autograd saves; for other storages, the module (in backward the
            autograd node) and the operation that made the storage, such as "layers.0.mlp: addmm".
    """

    number: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Resize:
    """Event: a storage is resized.

    Attributes:
        number: the storage's number, as in its ``Make``.
        bytes: the storage's new size.
    """

    number: int
    bytes: int


@dataclass(frozen=True)
class Free:
    """Event: a storage is freed.

    Attributes:
        number: the storage's number, as in its ``Make``.
    """

    number: int


@dataclass(frozen=True)
class Run:
    """Event: an operation has run.

    Attributes:
        op: the operation's name in ATen, such as "addmm".
        where: the name of the module, or in backward of the autograd node, in which the operation ran.
        flops: FLOPs of a matmul or of attention (causal attention counts half); 0 for other operations.
        read: bytes of each tensor that the operation read.
        written: bytes of each tensor that the operation wrote.
    """

    op: str
    where: str
    flops: int
    read: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True)
class Mark:
    """Event that marks a place on the tape, so that code can find this place; nothing is made, freed or run there.

    Attributes:
        name: ``FORWARD`` or ``BACKWARD`` where that pass begins, or a name that the recording code chose.
    """

    name: str


@dataclass(frozen=True)
class Gradient:
    """Event: backward has computed a weight's gradient.

    A tape is of a later microbatch of a step: the new gradient is added to the weight's ``.grad``, and freed.  In the
    first microbatch there is no ``.grad`` yet, so the new gradient, or a copy of it, becomes the ``.grad`` and stays.

    Attributes:
        number: the number of the new gradient's storage, as in its ``Make``; -1 if a copy of the gradient would become
            the ``.grad``.
        bytes: the size of the ``.grad`` that stays after the first microbatch.
    """

    number: int
    bytes: int


Event = Make | Resize | Free | Run | Mark | Gradient
EVENT_KINDS: tuple[type, ...] = (Make, Resize, Free, Run, Mark, Gradient)


def sizes_of(event: Event) -> list[int]:
    """Return an event's sizes as one list, in the order in which ``with_sizes`` takes them.

    An event recorded in a run holds numbers.  An event of a ``Tape`` holds, in place of each number, the index of its
    formula in ``Tape.formulas``.

    Returns: the bytes; for a ``Run`` its FLOPs, then the bytes of each tensor read and of each written; an empty list
        for an event that has no size.
    """
    if isinstance(event, (Make, Resize, Gradient)):
        return [event.bytes]
    return [event.flops, *event.read, *event.written] if isinstance(event, Run) else []


def used_in(events: Iterable[Event]) -> set[int]:
    """Return the indices, in ``Tape.formulas``, of all formulas that these events have in place of sizes."""
    return {i for event in events for i in sizes_of(event)}


def value(formula: Formula, sizes: Sequence[int]) -> int:
    """Return the value of a formula at these sizes, a number of bytes or FLOPs.

    Args:
        formula: a sum of monomials.  Each has a coefficient and the power of every letter, in a fixed order.
        sizes: the value of every letter, in the same order.

    Raises: ConfigError if the result is not a whole number.  Then the model needs one size to be a multiple of another
        size (h of a, for example), and it isn't.
    """
    total: Fraction | int = 0
    for coefficient, powers in formula:
        above = coefficient.numerator * prod(x**e for x, e in zip(sizes, powers) if e > 0)
        below = coefficient.denominator * prod(x**-e for x, e in zip(sizes, powers) if e < 0)
        total += Fraction(above, below) if below > 1 else above
    if isinstance(total, Fraction) and total.denominator != 1:
        raise ConfigError("at", f"the sizes don't divide each other as the model's must: {total} bytes")
    return int(total)


def parsed_sizes(text: str) -> dict[str, int]:
    """Return a dict from letters to sizes for a text such as ``s=200,b=3``.

    Raises: ConfigError if the text has another form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        letter, equals, number = (x.strip() for x in part.partition("="))
        if not equals or not re.fullmatch(r"[0-9]{1,15}", number) or letter in sizes:
            raise ConfigError("at", f"must be sizes as s=200,b=3, each once, got {part.strip()!r}")
        sizes[letter] = int(number)
    return sizes


def added(formulas: Iterable[Formula]) -> Formula:
    """Return the sum of formulas over the same letters, as one formula."""
    sums: dict[tuple[int, ...], Fraction] = {}
    for formula in formulas:
        for coefficient, powers in formula:
            sums[powers] = sums.get(powers, Fraction(0)) + coefficient
    return tuple((sums[powers], powers) for powers in sorted(sums) if sums[powers])


def formula_text(formula: Formula, letters: Sequence[str]) -> str:
    """Return a formula as text, such as ``34sbh + 5as²b``.

    The monomial with the highest power comes first, and the letters are in the paper's order.

    Args:
        formula: the formula, a sum of monomials.
        letters: the letters, in the order of each monomial's powers.
    """
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
    """Memory and FLOPs that a tape gives at one set of sizes.

    Bytes count all storages except those of weights, weights' gradients, buffers and inputs.

    Attributes:
        kept_bytes: bytes alive when forward ends.
        peak_bytes: the most bytes that are alive after any operation of backward.
        kept_rows: the storages that are alive when forward ends, one Row for each name.
        peak_rows: the storages that are alive at the peak, one Row for each name.
        flops: FLOPs of matmuls and attention, under the keys ``FORWARD`` and ``BACKWARD``.
        moved_bytes: bytes that operations read and write, under the same two keys.
    """

    kept_bytes: int = 0
    peak_bytes: int = 0
    kept_rows: list[Row] = field(default_factory=list)
    peak_rows: list[Row] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Tape:
    """The events of a forward and a backward pass, with formulas for their sizes.

    If a size is 1, torch may run other operations (it may need no copy, for example), so a tape has several lists of
    events.

    Attributes:
        letters: the letters of the formulas, in the order of the monomials' powers.
        formulas: the formulas.  In place of each of its sizes an event has an index into this list.
        variants: a dict of lists of events.  The key is the sorted tuple of letters that are 1; ``()`` is for sizes
            that are all above 1.  A tuple is left out if its events equal those of a tuple with fewer of its letters.
    """

    letters: tuple[str, ...]
    formulas: list[Formula]
    variants: dict[tuple[str, ...], list[Event]]

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise ConfigError unless ``sizes`` has a valid size for each letter of the tape, and no other letter."""
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
        """Return the list of events at these sizes, with bytes and FLOPs in place of the formulas' indices.

        Args:
            sizes: the value of each letter.

        Raises: ConfigError if a letter is missing or unknown, or if a formula has no whole value at these sizes.
        """
        self.check(sizes)
        chosen = self.variants[self.ones(sizes)]
        values = self.values(used_in(chosen), sizes)
        return [with_sizes(event, [values[i] for i in sizes_of(event)]) for event in chosen]

    def ones(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the key of ``variants`` whose events run at these sizes, a tuple of letters that are 1."""
        ones = sorted(letter for letter in MAY_BE_ONE if sizes.get(letter) == 1)
        subsets = (subset for n in range(len(ones), -1, -1) for subset in combinations(ones, n))
        return next(subset for subset in subsets if subset in self.variants)

    def values(self, used: Iterable[int], sizes: Mapping[str, int]) -> dict[int, int]:
        """Return the values of some of the tape's formulas.

        Args:
            used: the formulas' indices in ``formulas``.
            sizes: the value of each letter; they are not checked.

        Returns: a dict from indices to bytes or FLOPs.  It also has 0 under ``NOTHING``, which stands for a formula
            that is always 0.
        """
        in_order = [sizes[letter] for letter in self.letters]
        return {NOTHING: 0, **{i: value(self.formulas[i], in_order) for i in used}}

    def kept_formula(self) -> Formula:
        """Return the formula of the bytes alive when forward ends, valid if all sizes are above 1."""
        nothing = dict.fromkeys(range(len(self.formulas)), 0)
        alive = next(alive for event, _, alive in moments(self.variants[()], nothing) if event == Mark(BACKWARD))
        return added(self.formulas[made.bytes] for made in alive.values())

    def at(self, sizes: Mapping[str, int]) -> Reading:
        """Return memory and FLOPs at these sizes, as a Reading.

        Args:
            sizes: the value of each letter.

        Raises: ConfigError if a letter is missing or unknown, or if a formula has no whole value at these sizes.
        """
        return read_events(self.events(sizes))

    def to_json(self) -> str:
        """Return the tape as JSON text, which ``from_json`` reads."""
        return json.dumps(packed({"": self}), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Tape:
        """Return the tape that ``to_json`` wrote.  Raises ConfigError if the text is anything else."""
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
    """Return several tapes as one small dict for JSON, which has each formula and each string once.

    Args:
        tapes: the tapes by name, all over the same letters.

    Returns: a dict with "letters"; "formulas"; "words", all strings of the events; and "tapes": for each tape its
        variants, where an event is a list of numbers, indices into "formulas" and "words" among them.
    """
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
    """Return one of the tapes in a dict that ``packed`` made.

    Args:
        tapes: the dict of formulas, words and events that ``packed`` returned.
        name: the name that the tape had in the argument of ``packed``.

    Raises: ValueError, KeyError, TypeError or a similar exception if ``tapes`` is anything else.
    """
    words = tapes["words"]

    def event(fields: list) -> Event:
        kind = EVENT_KINDS[fields[0]]
        types = zip(kind.__annotations__.values(), fields[1:], strict=True)
        return kind(*(words[x] if t == "str" else tuple(x) if t != "int" else x for t, x in types))

    def monomial(coefficient: str, *powers: int) -> Monomial:
        # A file from elsewhere could have numbers so large that they take forever.
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
    """Return a copy of an event with other sizes.

    Args:
        event: the event.
        sizes: the new sizes, as many and in the same order as ``sizes_of(event)`` returns.
    """
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
    """Yield for each event, in order, the storages that are alive after it.

    Args:
        events: the events.
        values: None if the events' sizes are bytes.  If the sizes are indices of formulas: a dict from each index to
            the formula's value.

    Yields: the event; the bytes alive after it; and the storages alive after it, by number.  The dict of storages is
        one object, which is changed for every event: copy what you keep.
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
    """Return the events of a step's first microbatch, made from those of a later microbatch.

    In the first microbatch no weight has a ``.grad`` yet, so each new gradient stays, as a storage named ``GRADIENTS``.
    """
    changed: list[Event] = []
    replaced: set[int] = set()  # storages of gradients, which stay under a new number
    for event in events:
        if isinstance(event, Gradient):
            if event.number not in replaced:
                changed.append(Make(-1 - len(changed), event.bytes, GRADIENTS))
            if event.number >= 0 and event.number not in replaced:
                changed.insert(-1, Free(event.number))
                replaced.add(event.number)
        elif not (isinstance(event, (Free, Resize)) and event.number in replaced):
            changed.append(event)
    return changed


def alive_after(events: Sequence[Event], place: int) -> dict[int, Make]:
    """Return a dict from the number of each storage that is alive after ``events[place]`` to the storage's ``Make``.

    If a storage was resized, its ``Make`` here has the new size: bytes, or the index of a formula if the events have
    such indices.
    """
    *_, (_, _, alive) = moments(events[: place + 1])
    return alive


def read_events(events: Sequence[Event]) -> Reading:
    """Return memory and FLOPs, as a Reading, of a list of events whose sizes are bytes and FLOPs (not formulas)."""
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
