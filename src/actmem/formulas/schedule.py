"""Pipeline schedules as plain lists of actions, 1F1B and interleaved 1F1B, and when each action runs.

A schedule is one list of actions for each pipeline rank, in the order in which the rank runs
them.  Everything else follows from these lists: how many microbatches are in flight (``held``), whether the schedule
can run at all, and when each action runs (``timeline``).  Chunk c of rank r is stage c·p + r of
the model; with one chunk, rank and stage are the same.  Source: 2205.05198 section 4.2.3.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from actmem.config import ConfigError, Parallel, check_divides, check_size, check_sizes

#: The most forward passes in a schedule, of all ranks and chunks together.
LARGEST_SCHEDULE = 250_000


@dataclass(frozen=True)
class Action:
    """One forward or backward pass of one microbatch through one chunk.

    Attributes:
        kind: "F" for forward, "B" for backward.
        rank: the pipeline rank that runs the pass, from 0.
        chunk: the number of the model chunk on that rank, from 0.
        microbatch: the microbatch's number, from 0.
    """

    kind: str
    rank: int
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


Schedule = list[list[Action]]


def one_forward_one_backward(pipeline_parallel_size: int, num_microbatches: int) -> Schedule:
    """Make the 1F1B schedule: rank r runs p − r − 1 forwards first, then alternates one forward and one backward.

    With fewer microbatches than p − r − 1, rank r runs all its forwards first.

    Args:
        pipeline_parallel_size: p.
        num_microbatches: microbatches of one step.

    Returns: for each rank the list of its Actions, in the order in which it runs them.
    Source: 2205.05198 section 4.2.3.
    """
    p, n = pipeline_parallel_size, num_microbatches
    check_sizes(pipeline_parallel_size=p, num_microbatches=n)
    check_schedule_length(p * n)
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
    short_warmup: bool = False,
) -> Schedule:
    """Make the interleaved 1F1B schedule in Megatron's order: rank r runs 2(p − r − 1) + (m − 1)g forwards first.

    g microbatches go through one chunk, then the same g through the next. torch's ScheduleInterleaved1F1B runs the same
    order with the g of ``torch_microbatches_per_round``, so torch's and Megatron's order agree if p divides
    num_microbatches.

    Args:
        pipeline_parallel_size: p, at least 2 if m is more than 1.
        num_model_chunks: m, the model chunks on each rank.
        num_microbatches: microbatches of one step.
        microbatches_per_round: g; None: p.
        short_warmup: run only (p − r − 1) + (m − 1)g forwards first. A rank then holds fewer microbatches, and the step
            takes as long if sends take no time.

    Returns: for each rank the list of its Actions, in the order in which it runs them.
    Raises: ConfigError if g does not divide num_microbatches; and with several chunks if g is less than p − 1, unless
        it is num_microbatches. With such a g the ranks wait for each other forever, except for a few sizes with 2
        microbatches or a short warm-up, which are refused too.
    Source: 2205.05198 section 4.2.3, and 2104.04473 for the order.
    """
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    Parallel(pipeline_parallel_size=p, num_model_chunks=m)  # raises if the two don't fit
    check_size("num_microbatches", n)
    check_schedule_length(p * m * n)
    g = round_size(p, m, n, microbatches_per_round)
    order = [(chunk, start + i) for start in range(0, n, g) for chunk in range(m) for i in range(g)]
    ranks = []
    for rank in range(p):
        forwards = [Action("F", rank, chunk, i) for chunk, i in order]
        backwards = [Action("B", rank, m - 1 - chunk, i) for chunk, i in order]
        ranks.append(_in_turn(forwards, backwards, warmup=(2 - short_warmup) * (p - rank - 1) + (m - 1) * g))
    return ranks


def round_size(p: int, num_model_chunks: int, num_microbatches: int | None, microbatches_per_round: int | None) -> int:
    """Return g, the number of microbatches that go through one chunk before the next.

    Args:
        p: ranks of the pipeline.
        num_model_chunks: m, model chunks on each rank.
        num_microbatches: n, microbatches of one step; None: it is not checked that g divides n.
        microbatches_per_round: g; None: g is p.

    Raises: ConfigError if g doesn't divide n; and with several chunks if g is less than p − 1, unless it is n.
    """
    name, g = "microbatches_per_round", microbatches_per_round
    if g is None:
        name, g = "pipeline_parallel_size", p
    check_size(name, g)
    if num_microbatches is not None:
        check_divides("num_microbatches", num_microbatches, name, g)
    if num_model_chunks > 1 and g < p - 1 and g != num_microbatches:
        raise ConfigError(name, f"must be at least {p - 1} on {p} ranks or all microbatches, got {g}: deadlock")
    return g


def torch_microbatches_per_round(pipeline_parallel_size: int, num_microbatches: int) -> int:
    """Return the g of torch's ScheduleInterleaved1F1B: n / max(1, n // p), which lies between 1 and 2p − 1.

    g is the number of microbatches that go through one chunk before the next.

    Args:
        pipeline_parallel_size: p.
        num_microbatches: n, microbatches of one step.

    Raises: ConfigError if the number of rounds, max(1, n // p), does not divide n; torch refuses this too.
    """
    p, n = pipeline_parallel_size, num_microbatches
    check_sizes(pipeline_parallel_size=p, num_microbatches=n)
    rounds = max(1, n // p)
    return check_divides("num_microbatches", n, "the number of rounds", rounds)


def check_schedule_length(passes: int) -> None:
    """Raise ConfigError if a schedule would have more than LARGEST_SCHEDULE forward passes.

    Args:
        passes: the schedule's forward passes, on all ranks together.
    """
    if passes > LARGEST_SCHEDULE:
        rule = f"the schedule would list {passes:,} forward passes, at most {LARGEST_SCHEDULE:,}"
        raise ConfigError("num_microbatches", rule)


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return ``warmup`` forwards, then forward and backward alternately, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def held(actions: list[Action], weight: Callable[[Action], int] = lambda action: 1) -> list[int]:
    """Return how many microbatches, or how many bytes, one rank holds for backward after each of its actions.

    Args:
        actions: the rank's actions, in order.
        weight: returns what an action's forward adds and its backward removes, such as bytes. With the default, 1, the
            result is the number of microbatches in flight, all chunks together.

    Returns: one number for each action.
    """
    return list(accumulate(weight(action) if action.kind == "F" else -weight(action) for action in actions))


def peak_in_flight(ranks: Schedule) -> list[int]:
    """Return for each rank the most microbatches in flight at once; each counts once for each chunk that holds it.

    Args:
        ranks: a schedule: for each pipeline rank the list of its Actions.
    """
    return [max(held(actions), default=0) for actions in ranks]


def moving_window(actions: Iterable[Action], capacity: int) -> list[tuple[int, int]]:
    """Return the (chunk, microbatch) pairs of one rank that save everything; all other pairs are recomputed.

    The rule is that of appendix C: a pair saves everything if fewer than ``capacity`` such pairs are in flight when its
    forward runs; its backward makes room for a later pair. So the choice moves like a window.

    Args:
        actions: the rank's actions, in the order in which a schedule of any kind runs them.
        capacity: how many pairs can save everything at once.

    Returns: the pairs that save everything, in the order of their forwards.
    """
    kept: list[tuple[int, int]] = []
    places: set[tuple[int, int]] = set()
    for action in actions:
        which = action.chunk, action.microbatch
        if action.kind == "B":
            places.discard(which)
        elif len(places) < capacity:
            places.add(which)
            kept.append(which)
    return kept


def recomputed_share(capacity: int, in_flight: int, num_microbatches: int) -> Fraction:
    """Return the share of an iteration's microbatches that a 1F1B rank recomputes; 0 if all fit.

    Args:
        capacity: how many microbatches can save everything at once.
        in_flight: how many microbatches the rank holds for backward at once.
        num_microbatches: microbatches of one iteration.
    """
    check_sizes(in_flight=in_flight, num_microbatches=num_microbatches)
    check_size("capacity", capacity, least=0)
    rounds, rest = divmod(num_microbatches, in_flight)
    kept = rounds * min(capacity, in_flight) + min(capacity, rest)
    return Fraction(num_microbatches - kept, num_microbatches)
