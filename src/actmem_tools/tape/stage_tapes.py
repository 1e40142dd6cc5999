"""The peak of a pipeline stage's backward pass, from two stored tapes: of one layer, and of a model without layers.

Backward begins with the loss, runs the layers from the last to the first, and ends with the embedding.  A model without
layers runs the same but for a gap between loss and embedding, which is called the hole here: the layers would run
there.  While the last layer runs, the layers before it still hold all that they saved; when the embedding runs, no
layer holds anything.  So a stage holds most at a moment before the hole, at a moment of its last layer, or at a moment
after the hole, when all that its layers saved is freed.

``tests.tape.stages`` records the tapes (``make tapes``).  They have the FLOPs of each pass as one event.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

from actmem.config import ConfigError
from actmem.rows import Row, by_term, merge
from actmem_tools.tape.evaluate import BACKWARD, Event, Make, Mark, Run, Tape, alive_after, moments, unpacked, used_in

#: The mark where the layers would run.  In a layer's tape the first storage made after it is its output's gradient.
LAYERS = "layers"
FILE = Path(__file__).with_name("stage_tapes.json")
_GIVEN = "gradient of the stage's output"


@dataclass(frozen=True)
class StageMoment:
    """A moment of backward.

    Attributes:
        bytes: how many more bytes are alive than when forward ended.
        place: the moment is after ``events[place]``.
        stays: of ``bytes``, those of a gradient that another part of the model made and holds.
        events: the tape's events.
        values: the value of each formula by its number, which the events' sizes are.
    """

    bytes: int
    place: int = -1
    stays: int = 0
    events: Sequence[Event] = field(default=(), repr=False, compare=False)
    values: Mapping[int, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def made(self) -> dict[str, int]:
        """The storages that backward has made and not freed by then: bytes by name.

        They are read off the events only when they are asked for: of most moments the planner needs only ``bytes``.
        """
        rows = []
        if self.events:
            kept = alive_after(self.events, self.events.index(Mark(BACKWARD)))
            alive = alive_after(self.events, self.place)
            rows = [Row(made.name, self.values[made.bytes]) for number, made in alive.items() if number not in kept]
        return by_term([*rows, *([Row(_GIVEN, self.stays)] if self.stays else [])])


@dataclass(frozen=True)
class StagePart:
    """What the tape of a layer, or of embedding and loss, says at some sizes.

    The hole is where the layers would run.  All of a layer's backward is after the hole; the loss's backward is before
    it and the embedding's after it.

    Attributes:
        kept_bytes: bytes alive when forward ends.
        before: the moment of backward before the hole at which most is alive.
        at: the moment at which backward reaches the hole.
        after: the moment of backward after the hole at which most is alive.
        held: the same if the caller holds the gradient that came through the hole until backward ends.
        gradient_bytes: the size of that gradient.
        forward_flops: FLOPs of the forward pass.
        backward_flops: FLOPs of the backward pass, with recomputation.
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
    """Read a tape's events as a part of a stage.

    Args:
        events: the events, whose sizes are numbers of formulas.
        values: the value of each formula by its number.
    """
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
    """What a stage's backward adds to the memory at a moment.

    Attributes:
        bytes: what it has made and not freed by then, less what it has freed of what forward saved.
        moments: the moments of the stage's parts (a layer, the ends) that this moment is made of.
        elsewhere: further storages that are alive then, which no part made: bytes by name.
    """

    bytes: int
    moments: tuple[StageMoment, ...]
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The bytes by name, with what backward has freed as a negative row."""
        named = [*(item for part in self.moments for item in part.made.items()), *self.elsewhere.items()]
        rows = merge(Row(name, each, source="made in backward") for name, each in named if each)
        gone = self.bytes - sum(row.bytes for row in rows)
        return rows + ([Row("kept, freed by then", gone, source="backward is done with it")] if gone else [])


def transient(layer: StagePart, ends: StagePart | None, first: bool, last: bool, layers: int) -> Transient:
    """Find the moment at which a stage's backward adds most to the memory.

    Args:
        layer: one of the stage's layers.
        ends: what the stage has of embedding and loss; None if it has neither.
        first: whether it has the embedding.
        last: whether it has the loss.
        layers: how many layers the stage has, or with several chunks the one whose backward is next.
    """
    in_layer = layer.after if last else layer.held
    if ends is None or not last:
        candidates = [Transient(in_layer.bytes, (in_layer,))]
    else:
        # The gradient that leaves the loss is the one that enters the layer: it counts once.
        both = in_layer.bytes + ends.at.bytes - layer.gradient_bytes
        candidates = [Transient(ends.before.bytes, (ends.before,)), Transient(both, (in_layer, ends.at))]
    if ends is not None and first:
        given = 0 if last else layer.gradient_bytes
        size = ends.after.bytes + given - layers * layer.kept_bytes
        candidates.append(Transient(size, (ends.after,), {_GIVEN: given}))
    return max(candidates, key=lambda candidate: candidate.bytes)


@cache
def families() -> dict[str, dict]:
    """Load the stored tapes.

    Returns: by the kind of model ("gpt", "llama", …), a dict with "letters", "formulas", "words" and "tapes", as
        ``evaluate.packed`` returns it; ``stored_tape`` reads one of its tapes.
    """
    # Not read by its path: in a browser the package is an archive.
    return json.loads(resources.files("actmem_tools.tape").joinpath(FILE.name).read_text(encoding="utf-8"))


@cache
def stored_tape(family: str, name: str) -> Tape:
    """Return a stored tape.

    Args:
        family: the kind of model, a key of ``families()``.
        name: the part, and how ranks share it, as ``PlannedModel.part`` names it.

    Raises: ConfigError if there is no such tape.
    """
    if name not in families()[family]["tapes"]:
        raise ConfigError("tape", f"there is none for {name}")
    return unpacked(families()[family], name)


@lru_cache(maxsize=2**14)
def stage_part(family: str, name: str, sizes: tuple[int, ...]) -> StagePart:
    """Read a stored tape at some sizes.

    Args:
        family: see ``stored_tape``.
        name: see ``stored_tape``.
        sizes: the values of the tape's letters, in their order.
    """
    tape = stored_tape(family, name)
    at = dict(zip(tape.letters, sizes))
    events = tape.variants[tape.ones(at)]
    return stage_part_of(events, tape.values(used_in(events), at))
