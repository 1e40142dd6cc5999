"""Lab 5's orders: run on paper, with every rank's list as the learner's function gives it.

No cases: every order that runs through, holds no more than needed and loses no time is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from actmem.config import ConfigError
from actmem.formulas import schedule
from actmem.formulas.schedule import Action, Schedule
from actmem_course.judge.lab_checks.lab5_explain import explain_order
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.others import timeline


def run_on_paper(b: Bench, p: int, n: int, chunks: int = 1) -> Schedule:
    """Every rank's list as actions.  Raises Wrong if an entry is none."""
    ranks = []
    for rank in range(p):
        order = b["one_forward_one_backward"](p, rank, n) if chunks == 1 else b["interleaved"](p, rank, chunks, n)
        if not isinstance(order, (list, tuple)):
            advice = (
                ": is a return missing?"
                if order is None
                else ": put list(…) around it"
                if isinstance(order, Iterator)
                else ""
            )
            raise Wrong(f"expected a list, got {type(order).__name__}{advice}")
        ranks.append([_action(entry, rank, chunks) for entry in order])
    return ranks


def _action(entry: object, rank: int, chunks: int) -> Action:
    form = '("F", i) or ("B", i)' if chunks == 1 else '("F", c, i) or ("B", c, i)'
    if not isinstance(entry, (tuple, list)) or len(entry) != (2 if chunks == 1 else 3) or entry[0] not in ("F", "B"):
        raise Wrong(f"rank {rank}: each entry must be {form}, not {entry!r}")
    return Action(entry[0], rank, 0 if chunks == 1 else entry[1], entry[-1])


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks, 2 microbatches."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def check_one_forward_one_backward(b: Bench) -> None:
    for p, n in ((1, 3), (2, 4), (4, 8), (4, 4), (4, 2), (3, 7)):
        ranks, ours = run_on_paper(b, p, n), schedule.one_forward_one_backward(p, n)
        case = f"{counted(p, 'rank')}, {counted(n, 'microbatch')}"
        _check_runs(ranks, ours, n, 1, case)
        held = schedule.peak_in_flight(ranks)
        for rank in range(p):
            needed = min(p - rank, n)
            if held[rank] <= needed:
                continue
            if held[0] == n and all(a.kind == "F" for a in ranks[0][:n]):
                raise Wrong(
                    f"{case}: rank {rank} runs all forwards first and holds {counted(held[rank], 'microbatch')}; 1F1B holds {needed}: "
                    "start backwards as soon as the first gradient comes back"
                )
            if all(held[r] == min(p - r + 1, n) for r in range(p)):
                raise Wrong(
                    f"{case}: every rank runs one forward too many ahead: rank r runs p − r − 1, so that its first backward comes right after the next forward"
                )
            if len(set(held)) == 1:
                raise Wrong(
                    f"{case}: every rank runs equally many forwards ahead; the nearer to the end, the fewer are needed: p − r − 1"
                )
            raise Wrong(
                f"{case}: rank {rank} holds {counted(held[rank], 'microbatch')} at once; 1F1B holds p − r, at most n: {needed}"
            )
        _check_time(ranks, ours, case)


def check_interleaved(b: Bench) -> None:
    for p, m, n in ((2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 9)):
        ranks, ours = run_on_paper(b, p, n, m), schedule.interleaved(p, m, n)
        case = f"{counted(p, 'rank')}, {counted(m, 'chunk')}, {counted(n, 'microbatch')}"
        _check_runs(ranks, ours, n, m, case)
        _check_time(ranks, ours, case)
        held, needed = schedule.peak_in_flight(ranks), schedule.peak_in_flight(ours)
        for rank in range(p):
            if held[rank] > needed[rank]:
                why = explain_order(ranks, ours, "F") or "it runs 2(p − r − 1) + (m − 1)p forwards ahead"
                raise Wrong(
                    f"{case}: rank {rank} holds {held[rank]} chunk-microbatches at once, {needed[rank]} are enough: {why}"
                )


def _check_runs(ranks: Schedule, ours: Schedule, n: int, chunks: int, case: str) -> None:
    numbers = [(a.chunk, a.microbatch) for actions in ranks for a in actions]
    if any(c >= chunks for c, _ in numbers) and all(0 <= c < n and 0 <= i < chunks for c, i in numbers):
        raise Wrong(f'{case}: in ("F", c, i) the chunk comes before the microbatch; here they are swapped')
    try:
        timeline.validate(ranks, n, chunks)
    except ConfigError as error:
        about_order = "deadlock" in error.rule or "before its forward" in error.rule
        why = explain_order(ranks, ours) if about_order else ""
        raise Wrong(f"{case}: {error.rule}{why and f' ({why})'}") from None


def _check_time(ranks: Schedule, ours: Schedule, case: str) -> None:
    found, possible = (max(span.end for span in timeline.timeline(r)) for r in (ranks, ours))
    if found <= possible:
        return
    ahead = [next(i for i, a in enumerate(actions) if a.kind == "B") for actions in ranks]
    wanted = [next(i for i, a in enumerate(actions) if a.kind == "B") for actions in ours]
    why = explain_order(ranks, ours, "F")
    if not why and ahead != wanted:
        rank = next(rank for rank in range(len(ranks)) if ahead[rank] != wanted[rank])
        why = f"rank {rank} runs {counted(ahead[rank], 'forward')} before its first backward, not {wanted[rank]}"
    why = why or explain_order(ranks, ours, "B") or "in between, forwards and backwards alternate"
    raise Wrong(f"{case}: takes {found} units of time where {possible} are possible: {why}")
