"""Lab 5's orders: run on paper, with every rank's list as the learner's function gives it."""

from __future__ import annotations

from collections.abc import Iterator

from actmem import schedule
from actmem.config import ConfigError
from actmem.lab.judge.bench import Bench
from actmem.lab.judge.verdict import Wrong
from actmem.schedule import Action, Schedule


def run_on_paper(b: Bench, p: int, n: int, chunks: int = 1) -> Schedule:
    """Every rank's list as actions.  Raises Wrong if an entry is none."""
    ranks = []
    for rank in range(p):
        order = b["one_forward_one_backward"](p, rank, n) if chunks == 1 else b["interleaved"](p, rank, chunks, n)
        if not isinstance(order, (list, tuple)):
            advice = ": is a return missing?" if order is None else ": put list(…) around it" if isinstance(order, Iterator) else ""
            raise Wrong(f"a list is asked for, and this is {type(order).__name__}{advice}")
        ranks.append([_action(entry, rank, chunks) for entry in order])
    return ranks


def _action(entry: object, rank: int, chunks: int) -> Action:
    form = '("F", i) or ("B", i)' if chunks == 1 else '("F", c, i) or ("B", c, i)'
    if not isinstance(entry, (tuple, list)) or len(entry) != (2 if chunks == 1 else 3) or entry[0] not in ("F", "B"):
        raise Wrong(f"rank {rank}: each entry is {form}, and this is {entry!r}")
    return Action(entry[0], rank, 0 if chunks == 1 else entry[1], entry[-1])


def check_one_forward_one_backward(b: Bench) -> None:
    for p, n in ((1, 3), (2, 4), (4, 8), (4, 4), (4, 2), (3, 7)):
        ranks, case = run_on_paper(b, p, n), f"{p} ranks, {n} microbatches"
        _check_runs(ranks, n, 1, case)
        held = schedule.in_flight(ranks)
        for rank in range(p):
            needed = min(p - rank, n)
            if held[rank] <= needed:
                continue
            if held[0] == n and all(a.kind == "F" for a in ranks[0][:n]):
                raise Wrong(f"{case}: rank {rank} runs all forwards first and holds {held[rank]} microbatches; 1F1B holds {needed}: begin with backwards as soon as the first comes back")
            if all(held[r] == min(p - r + 1, n) for r in range(p)):
                raise Wrong(f"{case}: every rank runs one forward too many ahead: rank r runs p − r − 1, so that its first backward comes right after the next forward")
            if len(set(held)) == 1:
                raise Wrong(f"{case}: every rank runs equally many forwards ahead; the nearer to the end, the fewer are needed: p − r − 1")
            raise Wrong(f"{case}: rank {rank} holds {held[rank]} microbatches at once; 1F1B holds p − r, at most n: {needed}")
        _check_time(ranks, schedule.one_forward_one_backward(p, n), case)


def check_interleaved(b: Bench) -> None:
    for p, m, n in ((2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 9)):
        ranks = run_on_paper(b, p, n, m)
        case = f"{p} ranks, {m} chunks, {n} microbatches"
        _check_runs(ranks, n, m, case)
        ours = schedule.interleaved(p, m, n)
        _check_time(ranks, ours, case)
        held, needed = schedule.in_flight(ranks), schedule.in_flight(ours)
        for rank in range(p):
            if held[rank] > needed[rank]:
                raise Wrong(f"{case}: rank {rank} holds {held[rank]} chunk-microbatches at once, {needed[rank]} are enough: it runs 2(p − r − 1) + (m − 1)p forwards ahead")


def _check_runs(ranks: Schedule, n: int, chunks: int, case: str) -> None:
    try:
        schedule.validate(ranks, n, chunks)
    except ConfigError as error:
        raise Wrong(f"{case}: {error.rule}{_reversed(ranks)}") from None


def _reversed(ranks: Schedule) -> str:
    order = [a.microbatch for a in ranks[-1] if a.kind == "B" and a.chunk == 0]
    return " (backwards run in the order of the forwards, not the other way round)" if len(order) > 1 and order == sorted(order, reverse=True) else ""


def _check_time(ranks: Schedule, ours: Schedule, case: str) -> None:
    found, possible = (max(span.end for span in schedule.timeline(r)) for r in (ranks, ours))
    if found <= possible:
        return
    ahead = [next(i for i, a in enumerate(actions) if a.kind == "B") for actions in ranks]
    wanted = [next(i for i, a in enumerate(actions) if a.kind == "B") for actions in ours]
    if ahead != wanted:
        rank = next(rank for rank in range(len(ranks)) if ahead[rank] != wanted[rank])
        raise Wrong(f"{case}: takes {found} units of time, {possible} are possible: rank {rank} runs {ahead[rank]} forwards before its first backward, not {wanted[rank]}")
    raise Wrong(f"{case}: takes {found} units of time, {possible} are possible{_reversed(ranks)}: in between, forward and backward take turns")
