"""When each action of a schedule runs: every action starts as early as its rank and its inputs allow.

Idle time, the memory over time and the drawing are read off it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from actmem.config import ConfigError
from actmem.formulas.schedule import Action, Schedule, held_changes, split_backwards, stage_at


def validate(ranks: Schedule, num_microbatches: int, num_model_chunks: int = 1, v_shaped: bool = False) -> None:
    """Raise ConfigError on the first fault: a missing or repeated action, one of another rank, a
    backward before its forward, a "W" before its "B", or a deadlock.  v_shaped: as in ``timeline``."""
    for rank, actions in enumerate(ranks):
        seen: set[Action] = set()
        for action in actions:
            if action.kind not in _FIRST:
                raise ConfigError("schedule", f"rank {rank}: kind must be F, B or W, got {action.kind!r}")
            if action.rank != rank:
                raise ConfigError(
                    "schedule",
                    f"rank {rank} has {_named(action, num_model_chunks)}, which belongs to rank {action.rank}",
                )
            if not (0 <= action.chunk < num_model_chunks and 0 <= action.microbatch < num_microbatches):
                raise ConfigError(
                    "schedule", f"rank {rank} has {_named(action, num_model_chunks)}, and there is no such pass"
                )
            if action in seen:
                raise ConfigError("schedule", f"rank {rank} runs {_named(action, num_model_chunks)} twice")
            first, name = _FIRST[action.kind]
            if first and replace(action, kind=first) not in seen:
                raise ConfigError("schedule", f"rank {rank} runs {_named(action, num_model_chunks)} before its {name}")
            seen.add(action)
        for microbatch in range(num_microbatches):
            for chunk in range(num_model_chunks):
                for kind in "FB":
                    action = Action(kind, rank, chunk, microbatch)
                    if action not in seen:
                        raise ConfigError("schedule", f"rank {rank} never runs {_named(action, num_model_chunks)}")
    timeline(ranks, v_shaped=v_shaped)


#: What each kind of action needs of its own rank first.
_FIRST = {"F": ("", ""), "B": ("F", "forward"), "W": ("B", "backward")}


def _named(action: Action, num_model_chunks: int) -> str:
    """The action, with its chunk if there are several."""
    return f"{action}" + (" of chunk 0" if num_model_chunks > 1 and not action.chunk else "")


@dataclass(frozen=True)
class Span:
    """When an action runs, in the units of the times given to ``timeline``."""

    rank: int
    start: int
    end: int
    action: Action


def timeline(
    ranks: Schedule,
    forward_time: int = 1,
    backward_time: int = 2,
    send_time: int = 0,
    weight_time: int = 1,
    v_shaped: bool = False,
) -> list[Span]:
    """Simulate the schedule: every action starts as early as its rank and its inputs allow.

    The times are those of one chunk.  send_time: from one rank to the next; it overlaps with what
    both compute.  weight_time: the part of backward_time that a split backward leaves to its "W".  v_shaped: every
    second chunk goes back through the ranks, so that chunk 1 of rank r is stage 2p − 1 − r, not p + r.
    Spans are ordered by start.  Raises ConfigError on a deadlock, or if weight_time is not below backward_time.
    """
    if weight_time >= backward_time and any(a.kind == "W" for actions in ranks for a in actions):
        raise ConfigError("weight_time", f"must be below backward_time = {backward_time}, got {weight_time}")
    p = len(ranks)
    num_model_chunks = 1 + max((a.chunk for actions in ranks for a in actions), default=0)
    last_stage = p * num_model_chunks - 1
    stages = [[stage_at(rank, chunk, p, v_shaped) for chunk in range(num_model_chunks)] for rank in range(p)]
    rank_of = {stage: rank for rank in range(p) for stage in stages[rank]}
    ends: dict[tuple[str, int, int], int] = {}  # kind, stage, microbatch -> end
    spans: list[Span] = []
    done, free = [0] * p, [0] * p
    split = [split_backwards(actions) for actions in ranks]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                stage = stages[rank][action.chunk]
                needs = _needs(action, stage, last_stage)
                if not all(need in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] + send_time * (rank_of[need[1]] != rank) for need in needs)])
                left = weight_time * ((action.chunk, action.microbatch) in split[rank])
                free[rank] = start + {"F": forward_time, "B": backward_time - left, "W": weight_time}[action.kind]
                ends[action.kind, stage, action.microbatch] = free[rank]
                spans.append(Span(rank, start, free[rank], action))
                done[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {_named(ranks[rank][done[rank]], num_model_chunks)}"
        for rank in range(p)
        if done[rank] < len(ranks[rank])
    ]
    if stuck:
        raise ConfigError("schedule", f"deadlock, every input is still to come: {', '.join(stuck)}")
    return sorted(spans, key=lambda span: (span.start, span.rank))


def _needs(action: Action, stage: int, last_stage: int) -> list[tuple[str, int, int]]:
    """What must be done first: the neighbour's pass, for a backward its own forward, for a "W" its own "B"."""
    i = action.microbatch
    if action.kind == "W":
        return [("B", stage, i)]
    if action.kind == "F":
        return [("F", stage - 1, i)] if stage else []
    return [("F", stage, i)] + ([("B", stage + 1, i)] if stage < last_stage else [])


def _end(spans: list[Span]) -> int:
    if not spans:
        raise ConfigError("spans", "must hold at least one")
    return max(span.end for span in spans)


def bubble_of(spans: list[Span]) -> Fraction:
    """Idle time over working time of the rank that works least: the bubble x of 2104.04473.

    Idle time over the whole time is x / (1 + x).
    """
    whole = _end(spans)
    working: dict[int, int] = {}
    for span in spans:
        working[span.rank] = working.get(span.rank, 0) + span.end - span.start
    least = min(working.values())
    return Fraction(whole - least, least)


def memory_curve(
    spans: list[Span],
    rank: int,
    weight: Callable[[Action], int] = lambda action: 1,
    until_weight: Callable[[Action], int] | None = None,
) -> list[tuple[int, int]]:
    """Steps (time, what the rank holds from then on).  A forward allocates when it starts; a
    backward, or its "W", frees when it ends.  weight and until_weight are those of ``held``."""
    own = [span for span in spans if span.rank == rank]
    steps: dict[int, int] = {0: 0}
    for span, change in zip(own, held_changes([span.action for span in own], weight, until_weight)):
        when = span.start if span.action.kind == "F" else span.end
        steps[when] = steps.get(when, 0) + change
    times = sorted(steps)
    return list(zip(times, accumulate(steps[time] for time in times)))


def draw(spans: list[Span]) -> str:
    """The timeline as text: a line for each rank, a column for each unit of time.

    "F3" is the forward pass of microbatch 3, "B3" its backward pass, "W3" the part of it that is left to the weights;
    later columns of the same pass are "--".  If there are several chunks, a letter after the number says which.
    """
    chunks = any(span.action.chunk for span in spans)

    def label(action: Action) -> str:
        return f"{action.kind}{action.microbatch}" + (chr(ord("a") + action.chunk) if chunks else "")

    whole = _end(spans)
    width = max(len(label(span.action)) for span in spans)
    lines = []
    for rank in sorted({span.rank for span in spans}):
        cells = ["·".ljust(width)] * whole
        for span in (span for span in spans if span.rank == rank):
            cells[span.start : span.end] = [label(span.action).ljust(width)] + ["-" * width] * (
                span.end - span.start - 1
            )
        lines.append(f"rank {rank} | " + " ".join(cells).rstrip())
    return "\n".join(lines)
