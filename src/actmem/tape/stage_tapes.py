"""The peak of a pipeline stage's backward, from two stored tapes: one layer, and the model's ends around a hole.

Backward begins with the end, runs the layers from the last to the first, and ends with the embedding.  While the
last layer runs, those before it still have all that they kept, and when the embedding runs, none has anything.  So the
fullest moment is one before the hole, one of a single layer, or one after the hole, less what all layers have freed.
``tape.stages`` records the tapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from actmem.config import ConfigError
from actmem.rows import Row, by_term, merge
from actmem.tape.evaluate import (
    BACKWARD,
    Event,
    Formula,
    Free,
    Make,
    Mark,
    Resize,
    Tape,
    in_bytes,
    moments,
    packed_formulas,
    unpacked_formulas,
    value,
)

#: The mark where the gradient of the layers' output is there: the first thing made after it in a layer's tape.
LAYERS = "layers"
FILE = Path(__file__).with_name("stage_tapes.json")
_MARKS = {"<": BACKWARD, "^": LAYERS}
_GIVEN = "gradient of the stage's output"


@dataclass(frozen=True)
class StageMoment:
    """A moment of backward, after event ``place`` of ``events``, whose sizes are numbers of ``values``.

    bytes: alive beyond what was kept.  stays: of that, a gradient made elsewhere.  The planner needs only the bytes of
    most moments, so ``made`` is read off the events when asked for.
    """

    bytes: int
    place: int = -1
    stays: int = 0
    events: Sequence[Event] = field(default=(), repr=False, compare=False)
    values: Mapping[int, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def made(self) -> dict[str, int]:
        """What backward has made and not freed by then, in bytes by name."""
        kept: set[int] = set()
        alive: dict[int, Make] = {}
        for event, _, alive in moments(in_bytes(self.events[: self.place + 1], self.values)):
            if event == Mark(BACKWARD):
                kept = set(alive)
        rows = [Row(made.name, made.bytes) for number, made in alive.items() if number not in kept]
        return by_term([*rows, *([Row(_GIVEN, self.stays)] if self.stays else [])])


@dataclass(frozen=True)
class StagePart:
    """A layer or two ends at some sizes.

    The hole is where the layers would run.  kept_bytes: alive when forward ends.  before, after: the peak of backward on
    each side of the hole.  at: the moment backward reaches it.  held: as after, while the caller still holds the gradient
    that came through the hole, of ``gradient_bytes``.  A layer has all its backward after the hole, two ends around it.
    """

    kept_bytes: int
    before: StageMoment
    at: StageMoment
    after: StageMoment
    held: StageMoment
    gradient_bytes: int
    forward_flops: int
    backward_flops: int


def stage_part_of(events: Sequence[Event], values: Mapping[int, int], flops: tuple[int, int] = (0, 0)) -> StagePart:
    """What the events of a part add up to.  values: the bytes of each number that is a size in them."""
    live = kept = gradient = 0
    through = -1  # the number of the gradient that comes through the hole
    alive: dict[int, int] = {}
    phase = ""
    most: dict[str, tuple[int, int, int]] = {}  # bytes of the fullest moment, its place, and what stays beside it
    for place, event in enumerate(events):
        if isinstance(event, Make):
            alive[event.number] = size = values[event.bytes]
            live += size
            if phase == "hole":
                through, gradient, phase = event.number, size, "after"
            elif phase:
                if phase not in most or live > most[phase][0]:
                    most[phase] = live, place, 0
                stays = gradient if phase == "after" and through not in alive else 0
                if phase == "after" and ("held" not in most or live + stays > most["held"][0]):
                    most["held"] = live + stays, place, stays
        elif isinstance(event, Free):
            live -= alive.pop(event.number)
        elif isinstance(event, Resize):
            live += values[event.bytes] - alive[event.number]
            alive[event.number] = values[event.bytes]
        elif isinstance(event, Mark) and event.name == BACKWARD:
            kept, phase = live, "before"
        elif isinstance(event, Mark) and event.name == LAYERS:
            most["at"], phase = (live, place, 0), "hole"
    found = dict.fromkeys(("before", "at", "after", "held"), StageMoment(0))
    for name, (size, place, stays) in most.items():
        found[name] = StageMoment(size - kept, place, stays, events, values)
    return StagePart(kept, gradient_bytes=gradient, forward_flops=flops[0], backward_flops=flops[1], **found)


def _moments(
    layer: StagePart, ends: StagePart | None, first: bool, last: bool, layers: int
) -> Iterator[tuple[int, tuple[StageMoment, ...], int]]:
    """Moments of which one is the fullest: bytes beyond what the stage keeps, the parts' moments, a gradient given to them."""
    own = layer.after if last else layer.held
    if ends is None or not last:
        yield own.bytes, (own,), 0
    else:
        yield ends.before.bytes, (ends.before,), 0
        # The gradient that leaves the end is the one that enters the layer.
        yield own.bytes + ends.at.bytes - layer.gradient_bytes, (own, ends.at), 0
    if ends is not None and first:
        given = 0 if last else layer.gradient_bytes
        yield ends.after.bytes + given - layers * layer.kept_bytes, (ends.after,), given


def transient_bytes(layer: StagePart, ends: StagePart | None, first: bool, last: bool, layers: int) -> int:
    """What a stage's backward has made at its fullest moment, less what it has freed by then.

    ends: those that the stage has, of ``first`` and ``last``; None in the middle.  layers: of the stage, or of the chunk
    whose backward comes next.
    """
    return max(size for size, *_ in _moments(layer, ends, first, last, layers))


def transient_rows(layer: StagePart, ends: StagePart | None, first: bool, last: bool, layers: int) -> list[Row]:
    """``transient_bytes`` line by line."""
    size, parts, given = max(_moments(layer, ends, first, last, layers), key=lambda moment: moment[0])
    named = [*(item for part in parts for item in part.made.items()), (_GIVEN, given)]
    rows = merge(Row(name, each, source="made in backward") for name, each in named if each)
    gone = size - sum(row.bytes for row in rows)
    return rows + ([Row("kept, freed by then", gone, source="backward is done with it")] if gone else [])


@cache
def families() -> dict[str, dict]:
    """The stored tapes as the file has them, by the kind of model; see ``packed``."""
    # A page has them in an archive.
    text = resources.files("actmem.tape").joinpath(FILE.name).read_text(encoding="utf-8")
    stored = json.loads(text)
    return {name: {**family, "formulas": unpacked_formulas(family["formulas"])} for name, family in stored.items()}


@cache
def stored_tape(family: str, name: str) -> Tape:
    """The tape of that name, without FLOPs.  Raises ConfigError if there is none."""
    stored = families()[family]
    if name not in stored["tapes"]:
        raise ConfigError("tape", f"there is none for {name}")
    variants = {tuple(ones): _events(text, stored["words"]) for ones, text in stored["tapes"][name].items()}
    return Tape(tuple(stored["letters"]), stored["formulas"], variants)


@lru_cache(maxsize=2**14)
def stage_part(family: str, name: str, sizes: tuple[int, ...]) -> StagePart:
    """A part at these sizes, in the order of the family's letters."""
    tape = stored_tape(family, name)
    forward, backward = (value(tape.formulas[i], sizes) for i in families()[family]["flops"][name])
    return stage_part_of(*tape.values(dict(zip(tape.letters, sizes))), (forward, backward))


def packed(tapes: Mapping[str, Tape], flops: Mapping[str, tuple[Formula, Formula]]) -> dict:
    """What ``families`` reads, of tapes of the same letters: of each its events by the letters that are 1, and its FLOPs."""
    formulas: dict[Formula, int] = {}
    words: dict[str, int] = {}
    texts: dict[str, dict[str, str]] = {}
    for name, tape in tapes.items():
        numbers = [formulas.setdefault(formula, len(formulas)) for formula in tape.formulas]
        texts[name] = {"".join(ones): _text(events, numbers, words) for ones, events in tape.variants.items()}
    pairs = {name: [formulas.setdefault(f, len(formulas)) for f in pair] for name, pair in flops.items()}
    letters, lists = next(iter(tapes.values())).letters, packed_formulas(formulas)
    return {"letters": letters, "formulas": lists, "words": list(words), "tapes": texts, "flops": pairs}


def _events(text: str, words: list[str]) -> list[Event]:
    """What ``_text`` wrote."""
    events: list[Event] = []
    made = 0
    for token in text.split():
        if token in _MARKS:
            events.append(Mark(_MARKS[token]))
        elif token[0] == "-":
            events.append(Free(int(token[1:])))
        elif "=" in token:
            size, number = map(int, token.split("="))
            events.append(Resize(number, size))
        else:
            size, word = map(int, token.split("."))
            events.append(Make(made, size, words[word]))
            made += 1
    return events


def _text(events: Iterable[Event], numbers: list[int], words: dict[str, int]) -> str:
    marks = {name: sign for sign, name in _MARKS.items()}
    tokens: list[str] = []
    renumbered: dict[int, int] = {}
    for event in events:
        if isinstance(event, Make):
            renumbered[event.number] = len(renumbered)
            tokens.append(f"{numbers[event.bytes]}.{words.setdefault(event.name, len(words))}")
        elif isinstance(event, Free):
            tokens.append(f"-{renumbered[event.number]}")
        elif isinstance(event, Resize):
            tokens.append(f"{numbers[event.bytes]}={renumbered[event.number]}")
        elif isinstance(event, Mark) and event.name in marks:
            tokens.append(marks[event.name])
    return " ".join(tokens)
