"""Predict the peak of a pipeline stage's backward pass from two stored tapes.

One tape is of a single layer, the other of a model without layers: embedding and loss only.  In the second one, the
place where the layers would run is called the hole.

Backward runs the loss, then the layers from the last to the first, then the embedding.  While it runs the last layer,
the layers before it still hold everything that they saved; when it runs the embedding, no layer holds anything.  So the
peak is in one of three places: in the loss (before the hole), in the last layer, or in the embedding (after the hole).

``make tapes`` (``tests.tape.stages``) records the tapes.  They have the FLOPs of each pass as one event.
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
    """The memory of one part of a stage (a layer, or embedding and loss) at one moment of backward.

    Attributes:
        bytes: how many more bytes are alive than at the end of forward.
        place: the moment is right after ``events[place]``.
        stays: bytes of the gradient with which this part's backward started, if the part doesn't need it any more but
            its caller still holds it; 0 otherwise.  They are included in ``bytes``.
        events: the tape's events; their sizes are indices of formulas.
        values: the value of each formula by its index.
    """

    bytes: int
    place: int = -1
    stays: int = 0
    events: Sequence[Event] = field(default=(), repr=False, compare=False)
    values: Mapping[int, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def made(self) -> dict[str, int]:
        """Bytes by name of the storages that backward has made and not yet freed at this moment.

        They are computed on demand, because for most moments the planner needs only ``bytes``.
        """
        rows = []
        if self.events:
            kept = alive_after(self.events, self.events.index(Mark(BACKWARD)))
            alive = alive_after(self.events, self.place)
            rows = [Row(made.name, self.values[made.bytes]) for number, made in alive.items() if number not in kept]
        return by_term([*rows, *([Row(_GIVEN, self.stays)] if self.stays else [])])


@dataclass(frozen=True)
class StagePart:
    """Memory and FLOPs of one part of a stage at some sizes: of one layer, or of embedding and loss.

    The tape of embedding and loss has a hole in backward, where the layers would run: the loss's backward comes before
    it, the embedding's after it.  A layer's backward counts as after the hole.

    Attributes:
        kept_bytes: bytes alive when forward ends.
        before: the peak of backward before the hole.
        at: the moment at which backward reaches the hole.
        after: the peak of backward after the hole, if the gradient with which it starts is freed once it has been used.
        held: the peak of backward after the hole, if that gradient stays alive, as a gradient does that a pipeline rank
            has received.
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
    """Compute memory and FLOPs of one part of a stage from a tape's events.

    Args:
        events: the events; their sizes are indices of formulas.
        values: the value of each formula by its index.
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
    """How much more memory a stage holds at one moment of backward than when backward began.

    Attributes:
        bytes: bytes that backward has allocated and not yet freed, minus saved bytes that it has freed.
        moments: the moment's memory in each part of the stage that has allocated something: a layer, or embedding and
            loss.
        elsewhere: a dict from names to bytes of further storages that are alive, which none of these parts made.
    """

    bytes: int
    moments: tuple[StageMoment, ...]
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """A row for each name, with its bytes; saved tensors that backward has freed are one row of negative bytes."""
        named = [*(item for part in self.moments for item in part.made.items()), *self.elsewhere.items()]
        rows = merge(Row(name, each, source="made in backward") for name, each in named if each)
        gone = self.bytes - sum(row.bytes for row in rows)
        return rows + ([Row("kept, freed by then", gone, source="backward is done with it")] if gone else [])


def transient(layer: StagePart, ends: StagePart | None, first: bool, last: bool, layers: int) -> Transient:
    """Find how much more memory a stage needs at the peak of its backward pass than when backward began.

    Args:
        layer: memory of one of the stage's layers.
        ends: memory of the stage's embedding, loss or both; None if the stage has neither.
        first: whether the stage has the embedding.
        last: whether the stage has the loss.
        layers: how many layers the stage has; with several model chunks, how many the chunk has whose backward is next.

    Returns: the Transient of the peak: its bytes, and what they consist of.
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

    Returns: for each kind of model ("gpt", "llama", …) the dict that ``evaluate.packed`` made of its tapes;
        ``stored_tape`` returns one of them.
    """
    # Not read by its path: in a browser the package is an archive.
    return json.loads(resources.files("actmem_tools.tape").joinpath(FILE.name).read_text(encoding="utf-8"))


@cache
def stored_tape(family: str, name: str) -> Tape:
    """Return a stored tape.

    Args:
        family: the kind of model, a key of ``families()`` such as "gpt" or "llama".
        name: which part of the model the tape is of, and how ranks share it, such as "layer none sequence" or "last
            alone" (``PlannedModel.part`` makes these names).

    Raises: ConfigError if there is no such tape.
    """
    if name not in families()[family]["tapes"]:
        raise ConfigError("tape", f"there is none for {name}")
    return unpacked(families()[family], name)


@lru_cache(maxsize=2**14)
def stage_part(family: str, name: str, sizes: tuple[int, ...]) -> StagePart:
    """Compute memory and FLOPs of one part of a stage from a stored tape.

    Args:
        family: the kind of model, a key of ``families()`` such as "gpt" or "llama".
        name: the tape's name, such as "layer none sequence".
        sizes: the value of each of the tape's letters, in the order of ``Tape.letters``.
    """
    tape = stored_tape(family, name)
    at = dict(zip(tape.letters, sizes))
    events = tape.variants[tape.ones(at)]
    return stage_part_of(events, tape.values(used_in(events), at))
