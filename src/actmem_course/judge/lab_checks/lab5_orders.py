"""Lab 5's orders: run on paper, with every rank's list as the learner's function gives it.

No cases: every order that runs through, holds no more than needed and loses no time is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from actmem.config import ConfigError
from actmem.formulas import schedule
from actmem.formulas.schedule import Action, Schedule
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


def explain_order(ranks: Schedule, ours: Schedule, kinds: str = "FB") -> str:
    """The first mistake in the order of forwards (F) or backwards (B); nothing if every rank has ours.

    A rank that lacks a pass is left out.
    """
    for kind in kinds:
        for rank, (own, right) in enumerate(zip(ranks, ours)):
            found, wanted = ([a for a in actions if a.kind == kind] for actions in (own, right))
            if found == wanted or len(found) != len(wanted) or set(found) != set(wanted):
                continue
            right_until = next(i for i, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1])
            if kind == "B" and right_until and found[right_until:] == wanted[right_until:][::-1]:
                return f"the last backwards run in reverse: rank {rank} starts them with {found[right_until]}, not with {wanted[right_until]}"
            return _explain(found, wanted, rank, len(ranks))
    return ""


def _explain(found: list[Action], wanted: list[Action], rank: int, p: int) -> str:
    """Why all forwards of a rank, or all its backwards, are in a wrong order."""
    what = "forwards" if found[0].kind == "F" else "backwards"
    chunks = list(dict.fromkeys(a.chunk for a in wanted))
    if found[0].chunk != chunks[0]:
        return f"{what} begin with chunk {chunks[0]}, not with chunk {found[0].chunk}"
    microbatches = [a.microbatch for a in found if a.chunk == chunks[0]]
    if len(microbatches) > 1 and microbatches == sorted(microbatches, reverse=True):
        return (
            "backwards run in the order of the forwards, not the other way round"
            if what == "backwards"
            else "forwards begin with microbatch 0"
        )
    if len(chunks) == 1:
        return f"rank {rank} runs its {what} in another order than 0, 1, 2 and so on"
    asked = f"{p} microbatches go through chunk {chunks[0]} first, then the same {p} through chunk {chunks[1]}"
    if found == sorted(wanted, key=lambda a: (a.microbatch, chunks.index(a.chunk))):
        return f"the {what} take each microbatch through all chunks before the next one: {asked}"
    if found == sorted(wanted, key=lambda a: (chunks.index(a.chunk), a.microbatch)):
        return f"the {what} take all microbatches through chunk {chunks[0]} before any goes through chunk {chunks[1]}: {asked}"
    return f"rank {rank} runs its {what} in another order: {asked}"
