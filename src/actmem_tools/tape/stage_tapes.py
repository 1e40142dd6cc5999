"""The peak of a pipeline stage's backward, from two stored tapes: one layer, and the model's ends around a hole.

Backward begins with the end, runs the layers from the last to the first, and ends with the embedding.  While the
last layer runs, those before it still have all that they kept, and when the embedding runs, none has anything.  So the
fullest moment is one before the hole, one of a single layer, or one after the hole, less what all layers have freed.
``tests.tape.stages`` records the tapes (``make tapes``); of what runs they have the FLOPs of each pass as one event.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from actmem.config import ConfigError
from actmem.rows import Row, by_term, merge
from actmem_tools.tape.evaluate import BACKWARD, Event, Make, Mark, Run, Tape, alive_after, moments, unpacked, used_in

#: The mark where the gradient of the layers' output is there: the first thing made after it in a layer's tape.
LAYERS = "layers"
FILE = Path(__file__).with_name("stage_tapes.json")
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
        rows = []
        if self.events:
            kept = alive_after(self.events, self.events.index(Mark(BACKWARD)))
            alive = alive_after(self.events, self.place)
            rows = [Row(made.name, self.values[made.bytes]) for number, made in alive.items() if number not in kept]
        return by_term([*rows, *([Row(_GIVEN, self.stays)] if self.stays else [])])


@dataclass(frozen=True)
class StagePart:
    """A layer, or embedding and loss, at some sizes.

    The hole is where the layers would run.  A layer has all its backward after the hole, embedding and loss around it.

    kept_bytes: alive when forward ends.
    before, after: the peak of backward on each side of the hole.
    at: the moment backward reaches the hole.
    held: as after, while the caller still holds the gradient that came through the hole, of ``gradient_bytes``.
    """

    kept_bytes: int
    before: StageMoment
    at: StageMoment
    after: StageMoment
    held: StageMoment
    gradient_bytes: int
    forward_flops: int
    backward_flops: int


def stage_part_of(events: Sequence[Event], values: Mapping[int, int]) -> StagePart:
    """What the events of a part add up to.  values: of each number that is a size in them."""
    kept = gradient = 0
    through = -1  # the number of the gradient that comes through the hole
    phase, flops = "forward", {"forward": 0, "backward": 0}
    most: dict[str, tuple[int, int, int]] = {}  # bytes of the fullest moment, its place, and what stays beside it

    def note(name: str, live: int, place: int, stays: int) -> None:
        if name not in most or live + stays > most[name][0]:
            most[name] = live + stays, place, stays

    for place, (event, live, alive) in enumerate(moments(events, values)):
        if isinstance(event, Make):
            if phase == "hole":
                through, gradient, phase = event.number, values[event.bytes], "after"
            elif phase != "forward":
                note(phase, live, place, 0)
                if phase == "after":
                    note("held", live, place, 0 if through in alive else gradient)
        elif isinstance(event, Run):
            flops["forward" if phase == "forward" else "backward"] += values[event.flops]
        elif isinstance(event, Mark) and event.name == BACKWARD:
            kept, phase = live, "before"
        elif isinstance(event, Mark) and event.name == LAYERS:
            note("at", live, place, 0)
            phase = "hole"
    found = dict.fromkeys(("before", "at", "after", "held"), StageMoment(0))
    for name, (size, place, stays) in most.items():
        found[name] = StageMoment(size - kept, place, stays, events, values)
    before, at, after, held = found.values()
    return StagePart(kept, before, at, after, held, gradient, flops["forward"], flops["backward"])


@dataclass(frozen=True)
class Transient:
    """What a stage's backward has made at a moment, less what it has freed by then, in ``bytes``.

    moments: of the stage's parts.  elsewhere: what is made beside them, by name.
    """

    bytes: int
    moments: tuple[StageMoment, ...]
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The bytes line by line."""
        named = [*(item for part in self.moments for item in part.made.items()), *self.elsewhere.items()]
        rows = merge(Row(name, each, source="made in backward") for name, each in named if each)
        gone = self.bytes - sum(row.bytes for row in rows)
        return rows + ([Row("kept, freed by then", gone, source="backward is done with it")] if gone else [])


def transient(layer: StagePart, ends: StagePart | None, first: bool, last: bool, layers: int) -> Transient:
    """A stage's backward at its fullest moment.

    ends: those that the stage has, of ``first`` and ``last``; None in the middle.
    layers: of the stage, or of the chunk whose backward comes next.
    """
    own = layer.after if last else layer.held
    if ends is None or not last:
        found = [Transient(own.bytes, (own,))]
    else:
        # The gradient that leaves the end is the one that enters the layer.
        both = own.bytes + ends.at.bytes - layer.gradient_bytes
        found = [Transient(ends.before.bytes, (ends.before,)), Transient(both, (own, ends.at))]
    if ends is not None and first:
        given = 0 if last else layer.gradient_bytes
        size = ends.after.bytes + given - layers * layer.kept_bytes
        found.append(Transient(size, (ends.after,), {_GIVEN: given}))
    return max(found, key=lambda moment: moment.bytes)


@cache
def families() -> dict[str, dict]:
    """The stored tapes as the file has them (``evaluate.packed``), by the kind of model."""
    # A page has them in an archive.
    return json.loads(resources.files("actmem_tools.tape").joinpath(FILE.name).read_text(encoding="utf-8"))


@cache
def stored_tape(family: str, name: str) -> Tape:
    """The tape of that name.  Raises ConfigError if there is none."""
    if name not in families()[family]["tapes"]:
        raise ConfigError("tape", f"there is none for {name}")
    return unpacked(families()[family], name)


@lru_cache(maxsize=2**14)
def stage_part(family: str, name: str, sizes: tuple[int, ...]) -> StagePart:
    """A part at these sizes, in the order of the family's letters."""
    tape = stored_tape(family, name)
    at = dict(zip(tape.letters, sizes))
    events = tape.variants[tape.ones(at)]
    return stage_part_of(events, tape.values(used_in(events), at))
