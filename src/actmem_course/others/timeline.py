"""Simulate a pipeline schedule: when does each action run, how long are ranks idle, what do they hold over time?

An action is the forward ("F") or backward ("B") pass of one microbatch through one model chunk. Every action starts as
soon as its rank is free and its input has arrived.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from actmem.config import ConfigError
from actmem.formulas.schedule import Action, Schedule, held


def validate(ranks: Schedule, num_microbatches: int, num_model_chunks: int = 1) -> None:
    """Raise ConfigError if a schedule is invalid.

    Faults are a missing or repeated action, an action of another rank, a backward before its forward, or a deadlock.
    The error names the first fault.

    Args:
        ranks: the schedule: for each rank the list of its actions, in order.
        num_microbatches: how many microbatches the schedule should run.
        num_model_chunks: how many model chunks each rank has.
    """
    for rank, actions in enumerate(ranks):
        for fault in _faults(rank, actions, num_microbatches, num_model_chunks):
            raise ConfigError("schedule", f"rank {rank} {fault}")
    timeline(ranks)


def _faults(rank: int, actions: list[Action], num_microbatches: int, num_model_chunks: int) -> Iterator[str]:
    """Yield what is wrong with one rank's actions, in words."""
    seen: set[Action] = set()
    for action in actions:
        name = _named(action, num_model_chunks)
        if action.kind not in ("F", "B"):
            yield f"has {name}: kind must be F or B"
        if action.rank != rank:
            yield f"has {name}, which belongs to rank {action.rank}"
        if not (0 <= action.chunk < num_model_chunks and 0 <= action.microbatch < num_microbatches):
            yield f"has {name}, and there is no such pass"
        if action in seen:
            yield f"runs {name} twice"
        if action.kind == "B" and replace(action, kind="F") not in seen:
            yield f"runs {name} before its forward"
        seen.add(action)
    for microbatch, chunk, kind in product(range(num_microbatches), range(num_model_chunks), "FB"):
        action = Action(kind, rank, chunk, microbatch)
        if action not in seen:
            yield f"never runs {_named(action, num_model_chunks)}"


def _named(action: Action, num_model_chunks: int) -> str:
    """Return the action in words, with its chunk if there are several."""
    return f"{action}" + (" of chunk 0" if num_model_chunks > 1 and not action.chunk else "")


@dataclass(frozen=True)
class Span:
    """The time that one action takes on one rank.

    Attributes:
        rank: The rank's number, from 0.
        start: When the action starts, in the unit of the times given to ``timeline``, from 0.
        end: When the action ends, in the same unit.
        action: The forward or backward pass of one microbatch through one model chunk.
    """

    rank: int
    start: int
    end: int
    action: Action


def timeline(ranks: Schedule, forward_time: int = 1, backward_time: int = 2, send_time: int = 0) -> list[Span]:
    """Simulate a schedule: every action starts as soon as its rank is free and its input has arrived.

    Args:
        ranks: the schedule: for each rank the list of its actions, in order.
        forward_time: duration of the forward pass of one microbatch through one model chunk, in any unit.
        backward_time: duration of the backward pass of one microbatch through one model chunk, in the same unit.
        send_time: duration of a send from one rank to the next, in the same unit; both ranks compute meanwhile.

    Returns: a ``Span`` with the start and the end of every action, ordered by start.

    Raises: ConfigError on a deadlock.
    """
    p = len(ranks)
    num_model_chunks = 1 + max((a.chunk for actions in ranks for a in actions), default=0)
    last_stage = p * num_model_chunks - 1
    ends: dict[tuple[str, int, int], int] = {}  # kind, stage, microbatch -> end
    spans: list[Span] = []
    done, free = [0] * p, [0] * p
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                stage = action.chunk * p + rank
                needs = _needs(action, stage, last_stage)
                if not all(need in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] + send_time * (need[1] % p != rank) for need in needs)])
                free[rank] = start + (forward_time if action.kind == "F" else backward_time)
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
    """Return what must run before an action: the neighbour's pass, and for a backward also its own forward.

    Returns: kind, stage and microbatch of each.
    """
    i = action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, i)] if stage else []
    return [("F", stage, i)] + ([("B", stage + 1, i)] if stage < last_stage else [])


def _end(spans: list[Span]) -> int:
    if not spans:
        raise ConfigError("spans", "must hold at least one")
    return max(span.end for span in spans)


def bubble_of(spans: list[Span]) -> Fraction:
    """Return the pipeline's bubble as 2104.04473 defines it: idle time divided by computing time.

    The rank that computes least is taken. A bubble of x means that this rank is idle for x / (1 + x) of the step.

    Args:
        spans: when each action runs, from ``timeline``.
    """
    end = _end(spans)
    working: dict[int, int] = {}
    for span in spans:
        working[span.rank] = working.get(span.rank, 0) + span.end - span.start
    least = min(working.values())
    return Fraction(end - least, least)


def memory_curve(
    spans: list[Span], rank: int, weight: Callable[[Action], int] = lambda action: 1
) -> list[tuple[int, int]]:
    """Return how much a rank holds over time, as pairs (time, amount from this time on).

    A forward pass adds an amount when the pass starts; the backward pass of the same microbatch and chunk removes that
    amount when the backward pass ends.

    Args:
        spans: when each action runs, from ``timeline``.
        rank: the rank's number, from 0.
        weight: returns the amount that a forward pass adds, for example in bytes; by default 1, so that the amounts
            are numbers of forward passes.
    """
    rank_spans = [span for span in spans if span.rank == rank]
    steps: dict[int, int] = {0: 0}
    for span, holds in zip(rank_spans, held([span.action for span in rank_spans], weight)):
        steps[span.start if span.action.kind == "F" else span.end] = holds
    return sorted(steps.items())
