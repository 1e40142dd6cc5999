"""Lab 5: the pipeline.

No cases: an output can be freed in several ways, and several choices keep equally many microbatches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F

from actmem.config import ConfigError
from actmem.formulas import schedule
from actmem.formulas.first_stage import stage_output_rows
from actmem.formulas.microbatches import moving_window
from actmem.formulas.schedule import Action, Schedule, one_forward_one_backward, peak_in_flight
from actmem.models import PAPER_MODELS
from actmem.rows import total
from actmem_course.judge.compare import close, grad_of
from actmem_course.judge.reward import BarsReward, Measure, Reward
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.others.timeline import bubble_of, draw, timeline, validate


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
                    f"{case}: every rank runs equally many forwards ahead; rank r needs p − r − 1 of them, the last rank none"
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
        validate(ranks, n, chunks)
    except ConfigError as error:
        about_order = "deadlock" in error.rule or "before its forward" in error.rule
        why = explain_order(ranks, ours) if about_order else ""
        raise Wrong(f"{case}: {error.rule}{why and f' ({why})'}") from None


def _check_time(ranks: Schedule, ours: Schedule, case: str) -> None:
    found, possible = (max(span.end for span in timeline(r)) for r in (ranks, ours))
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


def check_free_output(b: Bench) -> None:
    x, weight, upstream = b.random(6, 8, seed=1), b.random(8, 8, seed=2), b.random(6, 8, seed=3)
    leaf = x.clone().requires_grad_()

    def stage(y: torch.Tensor) -> torch.Tensor:
        return y + F.linear(torch.tanh(y), weight)

    output = stage(leaf)
    storage = output.untyped_storage()
    size, first, graph = storage.nbytes(), ref(storage), output.grad_fn
    del storage
    b["free_output"](output)
    left = output.untyped_storage().nbytes()
    if first() is not None and left != 0:
        left = size  # the tensor has another storage now, and something still holds the first
    if not close(leaf.detach(), x):
        raise Wrong("the stage's input is changed; free only the output")
    if output.shape != x.shape:
        raise Wrong(
            f"the output has shape {list(output.shape)} now: backward compares the gradient's shape with it and refuses. "
            "Empty the tensor's storage and leave the tensor itself as it is"
        )
    if output.dtype != x.dtype:
        now, before = (str(tensor.dtype).removeprefix("torch.") for tensor in (output, x))
        raise Wrong(
            f"the output has dtype {now} now, not {before}: empty the tensor's storage and leave the tensor itself as it is"
        )
    if output.grad_fn is not graph:
        raise Wrong("the output has lost its graph: free its memory, and leave the tensor as it is")
    if left == size:
        raise Wrong(
            f"its {size} B are still there: a tensor's memory is its storage (untyped_storage), and something else may hold the tensor"
        )
    if left > output.element_size():  # a single element, expanded to all, is as good
        raise Wrong(f"{left} of its {size} B are still there")
    output.backward(upstream)
    again = x.clone().requires_grad_()
    stage(again).backward(upstream)
    if leaf.grad is None or not close(leaf.grad, grad_of(again)):
        raise Wrong(
            "backward gives another gradient than with the output in place: free only the output's memory, not what backward reads"
        )


def check_microbatches_to_keep(b: Bench) -> None:
    for p, rank, n, places in (
        (4, 0, 9, 2),
        (4, 1, 9, 1),
        (4, 3, 5, 1),
        (4, 0, 9, 4),
        (3, 0, 7, 0),
        (4, 0, 2, 1),
        (5, 1, 13, 3),
    ):
        case = f"p={p} rank={rank} microbatches={n} places={places}"
        found = _microbatches(b["microbatches_to_keep"](p, rank, n, places), n, case)
        most, held = 0, set()
        for action in one_forward_one_backward(p, n)[rank]:
            if action.kind == "F" and action.microbatch in found:
                held.add(action.microbatch)
            if action.kind == "B":
                held.discard(action.microbatch)
            most = max(most, len(held))
        if found and not places:
            raise Wrong(
                f"{case}: there are no places, so no microbatch can keep everything, but this returns {sorted(found)}"
            )
        if most > places:
            raise Wrong(
                f"{case}: {sorted(found)} need {most} places at once; a place becomes free only after the backward of the microbatch that holds it"
            )
        flight = min(p - rank, n)
        best = sum(i % flight < places for i in range(n))
        if len(found) < best:
            if len(found) <= places < best:
                raise Wrong(
                    f"{case}: {sorted(found)} never give up their places; a microbatch's backward frees its place for the next one: {best} can keep everything"
                )
            raise Wrong(
                f"{case}: {sorted(found)} keeps {len(found)}, and {best} can keep everything: take a place whenever one is free"
            )


def _microbatches(found: Any, n: int, case: str) -> list[int]:
    """What the learner's function returned as a list: a set, a range or numpy's array will do.  Raises Wrong if it is none."""
    asked = f"{case}: expected a list of different microbatches from 0 to {n - 1}, got "
    if isinstance(found, Iterator):
        raise Wrong(f"{asked}a {type(found).__name__}: put list(…) around it")
    try:
        if isinstance(found, (str, Mapping)) or any(isinstance(i, bool) for i in found):
            raise TypeError
        numbers = [operator.index(i) for i in found]
    except TypeError:
        raise Wrong(f"{asked}{found!r}") from None
    if not all(0 <= i < n for i in numbers) or len(set(numbers)) < len(numbers):
        raise Wrong(f"{asked}{found!r}")
    return numbers


def lab5_reward(b: Bench) -> Reward:
    """The learner's schedules on paper: what each rank holds, how long it takes."""
    p, n, m = 4, 8, 2
    plain, chunked = run_on_paper(b, p, n), run_on_paper(b, p, n, m)
    held = [
        Measure(f"in flight, rank {rank}", "", {"formula": min(p - rank, n), "yours": count})
        for rank, count in enumerate(peak_in_flight(plain))
    ]
    places = 2
    held += [
        Measure(
            f"whole, rank {rank}",
            "",
            {
                "formula": len(moving_window(actions, places)),
                "yours": len(list(b["microbatches_to_keep"](p, rank, n, places))),
            },
        )
        for rank, actions in enumerate(one_forward_one_backward(p, n))
    ]
    whole = (
        f"Whole: the microbatches that keep everything if {places} places are free for them; the others are recomputed."
    )
    bubbles = ", ".join(
        f"{name} {bubble_of(timeline(ranks))}" for name, ranks in (("1F1B", plain), ("interleaved, m=2,", chunked))
    )
    short = schedule.interleaved(p, m, n, short_warmup=True)
    times = {
        name: [max(span.end for span in timeline(ranks, 4, 8, send)) / 4 for send in (0, 1)]
        for name, ranks in (("yours", chunked), ("short", short))
    }
    shorter = (
        f"A shorter warm-up of (p − r − 1) + (m − 1)p forwards takes {times['short'][0]:g} units of time, yours {times['yours'][0]:g}, and holds "
        f"{peak_in_flight(short)[0]} chunks on rank 0, yours {peak_in_flight(chunked)[0]}. If a send takes a quarter of a forward: "
        f"{times['short'][1]:g} and {times['yours'][1]:g}. The longer one hides the sends."
    )
    model = PAPER_MODELS["530B"]
    freed = total(stage_output_rows(model.shape, replace(model.parallel, num_model_chunks=1), 0))
    picture = draw(timeline(run_on_paper(b, p, p)))
    return BarsReward(
        f"Your 1F1B on {p} ranks, {n} microbatches", tuple(held),
        f"Bubble (idle over working time): {bubbles}.\n{whole}\n{shorter}\nFreeing outputs saves {freed:,} B on rank 0 of the 530B model.\n\n{picture}",
        one_scale=True,
    )  # fmt: skip
