"""Pipeline schedules as plain lists of actions: 1F1B and interleaved 1F1B.

A schedule is one list of actions for each pipeline rank, in the order in which the rank runs
them.  Everything else is read from these lists: how much is in flight, whether the schedule
can run at all, when each action runs, and the drawing.  Chunk c of rank r is stage c·p + r of
the model; with one chunk, rank and stage are the same.  Source: 2205.05198 section 4.2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from actmem.config import ConfigError, check_divides, check_size


@dataclass(frozen=True)
class Action:
    """One forward (kind "F") or backward (kind "B") pass of one microbatch through one chunk."""

    kind: str
    rank: int
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


Schedule = list[list[Action]]


def one_forward_one_backward(pipeline_parallel_size: int, num_microbatches: int) -> Schedule:
    """1F1B: rank r runs p − r − 1 forwards ahead, then one forward and one backward in turn.

    With fewer microbatches than that, all forwards come first.  Source: section 4.2.3.
    """
    p = check_size("pipeline_parallel_size", pipeline_parallel_size)
    n = check_size("num_microbatches", num_microbatches)
    ranks = []
    for rank in range(p):
        forwards = [Action("F", rank, 0, i) for i in range(n)]
        backwards = [Action("B", rank, 0, i) for i in range(n)]
        ranks.append(_in_turn(forwards, backwards, warmup=p - rank - 1))
    return ranks


def interleaved(
    pipeline_parallel_size: int,
    num_model_chunks: int,
    num_microbatches: int,
    microbatches_per_round: int | None = None,
) -> Schedule:
    """Interleaved 1F1B in Megatron's order: rank r runs 2(p − r − 1) + (m − 1)g forwards ahead.

    g microbatches (default p) go through one chunk, then the same g through the next.  Raises
    ConfigError if g does not divide num_microbatches.  torch's ScheduleInterleaved1F1B runs the
    same order with the g of ``torch_microbatches_per_round``, so both are one where p divides
    num_microbatches.  Source: section 4.2.3, and 2104.04473 for the order.
    """
    p = check_size("pipeline_parallel_size", pipeline_parallel_size)
    m = check_size("num_model_chunks", num_model_chunks)
    n = check_size("num_microbatches", num_microbatches)
    if microbatches_per_round is None:
        check_divides("num_microbatches", n, "pipeline_parallel_size", p)
        g = p
    else:
        g = check_size("microbatches_per_round", microbatches_per_round)
        check_divides("num_microbatches", n, "microbatches_per_round", g)
    order = [(chunk, start + i) for start in range(0, n, g) for chunk in range(m) for i in range(g)]
    ranks = []
    for rank in range(p):
        forwards = [Action("F", rank, chunk, i) for chunk, i in order]
        backwards = [Action("B", rank, m - 1 - chunk, i) for chunk, i in order]
        ranks.append(_in_turn(forwards, backwards, warmup=2 * (p - rank - 1) + (m - 1) * g))
    return ranks


def torch_microbatches_per_round(pipeline_parallel_size: int, num_microbatches: int) -> int:
    """The g of torch's ScheduleInterleaved1F1B: n // max(1, n // p), so from 1 to 2p − 1.

    Raises ConfigError where torch refuses: g must divide n.
    """
    p = check_size("pipeline_parallel_size", pipeline_parallel_size)
    n = check_size("num_microbatches", num_microbatches)
    rounds = max(1, n // p)
    return check_divides("num_microbatches", n, "the number of rounds", rounds)


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards, then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def held(actions: list[Action], weight: Callable[[Action], int] = lambda action: 1) -> list[int]:
    """What one rank holds after each of its actions.

    weight: what a forward adds and its backward takes away; by default 1, which counts the
    microbatches in flight (of all chunks together).
    """
    return list(accumulate(weight(a) if a.kind == "F" else -weight(a) for a in actions))


def in_flight(ranks: Schedule) -> list[int]:
    """For each rank the most chunk-microbatches that it holds at once."""
    return [max(held(actions), default=0) for actions in ranks]


def validate(ranks: Schedule, num_microbatches: int, num_model_chunks: int = 1) -> None:
    """Raise ConfigError on the first fault: a missing, foreign or repeated action, a backward
    before its forward, or ranks that wait for each other for ever."""
    for rank, actions in enumerate(ranks):
        seen: set[Action] = set()
        for action in actions:
            if action.kind not in ("F", "B"):
                raise ConfigError("schedule", f"rank {rank}: kind must be F or B, got {action.kind!r}")
            if action.rank != rank:
                raise ConfigError("schedule", f"rank {rank} has {_named(action, num_model_chunks)}, which belongs to rank {action.rank}")
            if not (0 <= action.chunk < num_model_chunks and 0 <= action.microbatch < num_microbatches):
                raise ConfigError("schedule", f"rank {rank} has {_named(action, num_model_chunks)}, and there is no such pass")
            if action in seen:
                raise ConfigError("schedule", f"rank {rank} runs {_named(action, num_model_chunks)} twice")
            if action.kind == "B" and Action("F", rank, action.chunk, action.microbatch) not in seen:
                raise ConfigError("schedule", f"rank {rank} runs {_named(action, num_model_chunks)} before its forward")
            seen.add(action)
        for microbatch in range(num_microbatches):
            for chunk in range(num_model_chunks):
                for kind in "FB":
                    action = Action(kind, rank, chunk, microbatch)
                    if action not in seen:
                        raise ConfigError("schedule", f"rank {rank} never runs {_named(action, num_model_chunks)}")
    timeline(ranks)


def _named(action: Action, num_model_chunks: int) -> str:
    """The action with its chunk, also the first one where there are several."""
    return f"{action}" + (" of chunk 0" if num_model_chunks > 1 and not action.chunk else "")


@dataclass(frozen=True)
class Span:
    """When an action runs, in the units of the times given to ``timeline``."""

    rank: int
    start: int
    end: int
    action: Action


def timeline(ranks: Schedule, forward_time: int = 1, backward_time: int = 2) -> list[Span]:
    """Run the schedule on paper: every action as early as its rank and its inputs allow.

    The times are those of one chunk; sending takes none.  Spans come in order of their start.
    Raises ConfigError if the ranks wait for each other for ever.
    """
    p = len(ranks)
    num_model_chunks = 1 + max((a.chunk for actions in ranks for a in actions), default=0)
    last_stage = p * num_model_chunks - 1
    ends: dict[tuple[str, int, int], int] = {}  # kind, stage, microbatch -> when it was done
    spans: list[Span] = []
    done, free = [0] * p, [0] * p
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                needs = _needs(action, action.chunk * p + rank, last_stage)
                if not all(need in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = start + (forward_time if action.kind == "F" else backward_time)
                ends[action.kind, action.chunk * p + rank, action.microbatch] = free[rank]
                spans.append(Span(rank, start, free[rank], action))
                done[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {_named(ranks[rank][done[rank]], num_model_chunks)}" for rank in range(p) if done[rank] < len(ranks[rank])]
    if stuck:
        raise ConfigError("schedule", f"deadlock, every input is still to come: {', '.join(stuck)}")
    return sorted(spans, key=lambda span: (span.start, span.rank))


def _needs(action: Action, stage: int, last_stage: int) -> list[tuple[str, int, int]]:
    """What must be done before: the neighbour's pass, and for a backward its own forward."""
    i = action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, i)] if stage else []
    return [("F", stage, i)] + ([("B", stage + 1, i)] if stage < last_stage else [])


def bubble_fraction(spans: list[Span]) -> Fraction:
    """Idle time over working time, of the rank that works least.

    This is the bubble of 2104.04473.  Idle time over the whole time is x / (1 + x) of it.
    """
    whole = max(span.end for span in spans)
    working: dict[int, int] = {}
    for span in spans:
        working[span.rank] = working.get(span.rank, 0) + span.end - span.start
    least = min(working.values())
    return Fraction(whole - least, least)


def memory_curve(
    spans: list[Span], rank: int, weight: Callable[[Action], int] = lambda action: 1
) -> list[tuple[int, int]]:
    """Steps (time, what the rank holds from then on): taken when a forward starts, given back
    when its backward ends."""
    changes: dict[int, int] = {0: 0}
    for span in spans:
        if span.rank == rank:
            when, sign = (span.start, 1) if span.action.kind == "F" else (span.end, -1)
            changes[when] = changes.get(when, 0) + sign * weight(span.action)
    times = sorted(changes)
    return list(zip(times, accumulate(changes[time] for time in times)))


def draw(spans: list[Span]) -> str:
    """The timeline as text: a line for each rank, a column for each unit of time.

    "F3" is the forward pass of microbatch 3, "B3" its backward pass, which fills later columns
    with "--"; a letter behind the number is the chunk, where there are several.
    """
    chunks = any(span.action.chunk for span in spans)

    def label(action: Action) -> str:
        return f"{action.kind}{action.microbatch}" + (chr(ord("a") + action.chunk) if chunks else "")

    width = max(len(label(span.action)) for span in spans)
    whole = max(span.end for span in spans)
    lines = []
    for rank in sorted({span.rank for span in spans}):
        cells = ["·".ljust(width)] * whole
        for span in (span for span in spans if span.rank == rank):
            cells[span.start : span.end] = [label(span.action).ljust(width)] + ["-" * width] * (span.end - span.start - 1)
        lines.append(f"rank {rank} | " + " ".join(cells).rstrip())
    return "\n".join(lines)
