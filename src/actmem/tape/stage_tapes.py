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
from fractions import Fraction
from functools import cache, lru_cache
from importlib import resources
from itertools import combinations
from pathlib import Path

from actmem.config import ConfigError
from actmem.rows import Row, merge
from actmem.tape.evaluate import BACKWARD, MAY_BE_ONE, Event, Formula, Free, Make, Mark, Resize, Tape, value

#: The mark where the gradient of the layers' output is there: the first thing made after it in a layer's tape.
LAYERS = "layers"
FILE = Path(__file__).with_name("stage_tapes.json")
_MARKS = {"<": BACKWARD, "^": LAYERS}


#: What a tape's step does, to which storage, of which size (a number of ``sizes``), by which name.
Step = tuple[str, int, int, str]
_GIVEN = "gradient of the stage's output"


@dataclass(frozen=True)
class StageMoment:
    """A moment of backward, after step ``place``.

    bytes: alive beyond what was kept.  stays: of that, a gradient made elsewhere.  The planner needs only the bytes of
    most moments, so ``made`` is read off the steps when asked for.
    """

    bytes: int
    place: int = -1
    stays: int = 0
    steps: Sequence[Step] = field(default=(), repr=False, compare=False)
    sizes: Mapping[int, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def made(self) -> dict[str, int]:
        """What backward has made and not freed by then, in bytes by name."""
        alive: dict[int, tuple[int, str]] = {}
        begun = False
        for what, number, size, name in self.steps[: self.place + 1]:
            if what == "make" and begun:
                alive[number] = self.sizes[size], name
            elif what == "free":
                alive.pop(number, None)
            elif what == "resize" and number in alive:
                alive[number] = self.sizes[size], alive[number][1]
            elif what == BACKWARD:
                begun = True
        sums: dict[str, int] = {}
        for each, named in alive.values():
            sums[named] = sums.get(named, 0) + each
        return {**sums, **({_GIVEN: self.stays} if self.stays else {})}


@dataclass(frozen=True)
class StagePart:
    """A layer or two ends at some sizes.

    kept_bytes: alive when forward ends.  before, at, after: the fullest moment of backward before the hole, the moment at
    it, the fullest after it.  held: the fullest after it if the gradient that comes through the hole stays, which has
    ``gradient_bytes``.  A layer has all its backward after the hole, two ends around it.
    """

    kept_bytes: int
    before: StageMoment
    at: StageMoment
    after: StageMoment
    held: StageMoment
    gradient_bytes: int
    forward_flops: int
    backward_flops: int


def stage_part_of(steps: Sequence[Step], sizes: Mapping[int, int], flops: tuple[int, int] = (0, 0)) -> StagePart:
    """What the steps of a part add up to.  sizes: the bytes of each number that the steps give as a size."""
    live = kept = gradient = 0
    through = -1  # the number of the gradient that comes through the hole
    alive: dict[int, int] = {}
    phase = ""
    most: dict[str, tuple[int, int, int]] = {}  # bytes of the fullest moment, its place, and what stays beside it
    for place, (what, number, i, _) in enumerate(steps):
        if what == "make":
            alive[number] = size = sizes[i]
            live += size
            if phase == "hole":
                through, gradient, phase = number, size, "after"
            elif phase:
                if phase not in most or live > most[phase][0]:
                    most[phase] = live, place, 0
                stays = gradient if phase == "after" and through not in alive else 0
                if phase == "after" and ("held" not in most or live + stays > most["held"][0]):
                    most["held"] = live + stays, place, stays
        elif what == "free":
            live -= alive.pop(number)
        elif what == "resize":
            live += sizes[i] - alive[number]
            alive[number] = sizes[i]
        elif what == BACKWARD:
            kept, phase = live, "before"
        elif what == LAYERS:
            most["at"], phase = (live, place, 0), "hole"
    found = dict.fromkeys(("before", "at", "after", "held"), StageMoment(0))
    for name, (size, place, stays) in most.items():
        found[name] = StageMoment(size - kept, place, stays, steps, sizes)
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


@dataclass
class Family:
    """The tapes of one kind of model.  letters: their sizes.  texts: by name, and by the letters that are 1."""

    letters: tuple[str, ...]
    formulas: list[Formula]
    words: list[str]
    texts: dict[str, dict[str, str]]
    flops: dict[str, tuple[int, int]]
    parsed: dict[str, list[Step]] = field(default_factory=dict)

    def part(self, name: str, sizes: Mapping[str, int]) -> StagePart:
        """The tape of that name at these sizes.  Raises ConfigError if there is none."""
        if name not in self.texts:
            raise ConfigError("tape", f"there is none for {name}")
        own = [sizes[letter] for letter in self.letters]
        ones = sorted(letter for letter in MAY_BE_ONE if sizes.get(letter) == 1 and letter in self.letters)
        texts = self.texts[name]
        text = next(texts[key] for n in range(len(ones), -1, -1) for some in combinations(ones, n) if (key := "".join(some)) in texts)  # fmt: skip
        if text not in self.parsed:
            self.parsed[text] = self._parsed(text)
        steps = self.parsed[text]
        values = {i: value(self.formulas[i], own) for i in {i for _, _, i, _ in steps} if i >= 0}
        flops = tuple(value(self.formulas[i], own) for i in self.flops[name])
        return stage_part_of(steps, values, flops)  # type: ignore[arg-type]

    def _parsed(self, text: str) -> list[Step]:
        """Steps with numbers of formulas in place of bytes, -1 where there is none."""
        steps: list[Step] = []
        made = 0
        for token in text.split():
            if token in _MARKS:
                steps.append((_MARKS[token], 0, -1, ""))
            elif token[0] == "-":
                steps.append(("free", int(token[1:]), -1, ""))
            elif "=" in token:
                size, number = token.split("=")
                steps.append(("resize", int(number), int(size), ""))
            else:
                size, word = token.split(".")
                steps.append(("make", made, int(size), self.words[int(word)]))
                made += 1
        return steps


@cache
def families() -> dict[str, Family]:
    """The stored tapes, by the kind of model."""
    text = (
        resources.files("actmem.tape").joinpath(FILE.name).read_text(encoding="utf-8")
    )  # a page has them in an archive
    return {
        name: Family(
            tuple(packed["letters"]),
            [tuple((Fraction(c), tuple(powers)) for c, *powers in formula) for formula in packed["formulas"]],
            packed["words"],
            packed["tapes"],
            {tape: tuple(pair) for tape, pair in packed["flops"].items()},
        )
        for name, packed in json.loads(text).items()
    }


@lru_cache(maxsize=2**14)
def stage_part(family: str, name: str, sizes: tuple[int, ...]) -> StagePart:
    """A part at these sizes, in the order of the family's letters."""
    return families()[family].part(name, dict(zip(families()[family].letters, sizes)))


def packed(tapes: Mapping[str, Tape], flops: Mapping[str, tuple[Formula, Formula]]) -> dict:
    """What ``families`` reads, of tapes of the same letters."""
    formulas: dict[Formula, int] = {}
    words: dict[str, int] = {}
    texts: dict[str, dict[str, str]] = {}
    for name, tape in tapes.items():
        numbers = [formulas.setdefault(formula, len(formulas)) for formula in tape.formulas]
        texts[name] = {"".join(ones): _text(events, numbers, words) for ones, events in tape.variants.items()}
    pairs = {name: [formulas.setdefault(f, len(formulas)) for f in pair] for name, pair in flops.items()}
    lists = [[[str(c), *powers] for c, powers in formula] for formula in formulas]
    letters = next(iter(tapes.values())).letters
    return {"letters": letters, "formulas": lists, "words": list(words), "tapes": texts, "flops": pairs}


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
