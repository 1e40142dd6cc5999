"""Lab 5: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F

from actmem.config import ConfigError
from actmem.formulas import schedule
from actmem.formulas.schedule import Action, Schedule, peak_in_flight
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, check_whole_number
from actmem_course.judge.verdict import Wrong, refuse
from actmem_course.judge.workbench import Bench
from actmem_course.others.timeline import timeline, validate

#: Budget, in flight, bytes in full and recomputed.
BUDGETS = (
    (100, 4, 30, 10), (60, 4, 30, 10), (40, 4, 30, 10), (39, 4, 30, 10), (10**6, 4, 30, 10), (119, 4, 30, 10),
    (85, 3, 40, 7), (100, 4, 10, 10), (30, 4, 10, 10),
    (2**62 + 39, 4, 2**60 + 10, 10),  # one byte too few for four, which a float can't tell
)  # fmt: skip
#: p, rank, microbatches, places.
WINDOWS = ((4, 0, 9, 2), (4, 1, 9, 1), (4, 3, 5, 1), (4, 0, 9, 4), (3, 0, 7, 0), (4, 0, 2, 1), (5, 1, 13, 3))


def _see_orders(r: CaseRun, *sizes: tuple[int, int, int]) -> None:
    """Every rank's list for p ranks, n microbatches and m chunks of each.  Raises Wrong if the ranks can't run them."""
    cases = {}
    for p, n, m in sizes:
        case = f"{counted(p, 'rank')}, {counted(m, 'chunk')}, {counted(n, 'microbatch')}".replace("1 chunk, ", "")
        cases[case] = on_paper(r.b, p, n, m), n, m
        r.see(f"{case}: the order", cases[case][0], "any")
    for case, (ranks, n, m) in cases.items():
        _see_costs(r, case, ranks, n, m)


def _see_costs(r: CaseRun, case: str, ranks: Schedule, n: int, chunks: int) -> None:
    """Every order is right that takes no longer than ours, and holds no more."""
    swapped = chunks > 1 and all(a.chunk < n and a.microbatch < chunks for actions in ranks for a in actions)
    if swapped and any(a.chunk >= chunks for actions in ranks for a in actions):
        raise Wrong(f'{case}: in ("F", c, i) the chunk comes before the microbatch; here they are swapped')
    for rank, actions in enumerate(ranks):
        if (forwards := sum(action.kind == "F" for action in actions)) > n * chunks:
            raise Wrong(
                f"{case}: rank {rank} runs {forwards} forwards, and there are {n * chunks}: no more can run ahead"
            )
    try:
        validate(ranks, n, chunks)
    except ConfigError as error:
        raise Wrong(f"{case}: {error.rule}") from None
    end = max(span.end for span in timeline(ranks))
    r.see(f"{case}: units of time", end, "most", case + ": takes {found} units of time where {enough} are possible")
    for rank, held in enumerate(peak_in_flight(ranks)):
        words = f"{case}: rank {rank} holds {{found}} microbatches at once, where {{enough}} are enough"
        r.see(f"{case}: held by rank {rank}", held, "most", words)


def on_paper(b: Bench, p: int, n: int, chunks: int = 1) -> Schedule:
    """Every rank's list as actions.  Raises Wrong if an entry is none."""
    orders = [
        b["one_forward_one_backward"](p, k, n) if chunks == 1 else b["interleaved"](p, k, chunks, n) for k in range(p)
    ]
    form, size = ('("F", i) or ("B", i)', 2) if chunks == 1 else ('("F", c, i) or ("B", c, i)', 3)
    for rank, order in enumerate(orders):
        if not isinstance(order, (list, tuple)):
            raise another_kind("a list", order)
        for entry in order:
            if not isinstance(entry, (tuple, list)) or len(entry) != size or entry[0] not in ("F", "B"):
                raise Wrong(f"rank {rank}: each entry must be {form}, not {entry!r}")
            for number in entry[1:]:
                check_whole_number(f"rank {rank}: in {form}, each letter after the first", number)
    return [[Action(e[0], rank, e[1] if size == 3 else 0, e[-1]) for e in order] for rank, order in enumerate(orders)]


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks, 2 microbatches."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def one_forward_one_backward(r: CaseRun) -> None:
    _see_orders(r, (1, 3, 1), (2, 4, 1), (4, 8, 1), (4, 4, 1), (4, 2, 1), (3, 7, 1))


def interleaved(r: CaseRun) -> str:
    """A remark for whoever runs fewer forwards ahead, which is as good while sends take no time."""
    _see_orders(r, (2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 2))
    longer = peak_in_flight(schedule.interleaved(4, 2, 8))[0] > peak_in_flight(on_paper(r.b, 4, 8, 2))[0]
    return (
        "right where sends take no time; 2(p − r − 1) + (m − 1)p forwards ahead hide them, as Megatron-LM does" * longer
    )


def free_output(r: CaseRun) -> None:
    x, weight, upstream = r.same(6, 8), r.same(8, 8), r.same(6, 8)
    leaf = x.clone().requires_grad_()
    output = leaf + F.linear(torch.tanh(leaf), weight)
    storage, graph = output.untyped_storage(), output.grad_fn
    size, first = storage.nbytes(), ref(storage)
    del storage
    r["free_output"](output)
    now = output.untyped_storage()
    left = now.nbytes()
    if first() is not None and first() is not now:
        left = size  # the tensor has another storage now, and something still holds the first
    as_it_is = "empty the tensor's storage and leave the tensor itself as it is"
    r.see_tensor("the stage's input", leaf, "bits", "free only the output")
    why = f"backward compares the gradient's shape with it, so {as_it_is}"
    r.see("the output's shape", list(output.shape), "equal", why)
    r.see("the output's dtype", str(output.dtype).removeprefix("torch."), "equal", as_it_is)
    refuse((
        (output.grad_fn is not graph, "the output has lost its graph: free its memory, and leave the tensor as it is"),
        (left == size and first() is None, f"the tensor has another storage now, as large as the first, {size} B: free the storage that it had"),
        (left == size, f"the output's {size} B are still there: free its storage (untyped_storage). Did you free a copy's, or does something hold it?"),
        # A single element, expanded to all, is as good.
        (left > output.element_size(), f"{left} of the output's {size} B are still there: free all"),
    ))  # fmt: skip
    output.backward(upstream)
    r.see_tensor(
        "the gradient of the stage's input", leaf.grad, why="free only the output's memory, not what backward reads"
    )


def microbatches_to_keep(r: CaseRun) -> None:
    for p, rank, n, places in WINDOWS:
        case = f"p={p} rank={rank} microbatches={n} places={places}"
        found = _microbatches(r["microbatches_to_keep"](p, rank, n, places), n, case)
        r.see(f"{case}: kept", found, "any")
        held, most = 0, 0
        for action in schedule.one_forward_one_backward(p, n)[rank]:
            held += (action.microbatch in found) * (1 if action.kind == "F" else -1)
            most = max(most, held)
        words = f"{case}: {sorted(found)} need {{found}} places at once; a place becomes free only after the backward of the microbatch that holds it"
        r.see(f"{case}: places", max(most, places), "most", words)
        words = f"{case}: {sorted(found)} leaves {{found}} of {n} to recompute, where {{enough}} are enough: take a place whenever one is free"
        r.see(f"{case}: recomputed", n - len(found), "most", words)


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


def how_many_fit(r: CaseRun) -> None:
    for budget, flight, full, recomputed in BUDGETS:
        case = f"budget {budget} B, {flight} in flight, {full} B or {recomputed} B each"
        try:
            r.see_number(case, r["how_many_fit"](budget, flight, full, recomputed))
        except ZeroDivisionError:
            if full != recomputed:
                raise
            r.see(f"{case}: the result", "a division by zero", "equal")


_FIT, _SAVES = "left // more) if more else in_flight", " if more else in_flight"
_WHOLE_FIT = f"min(in_flight, {_FIT}"
_EXACTLY = (
    "those that keep everything take exactly the budget, and that does not exceed it: compare with <=, not with <"
)
_NONE_FITS = "not even recomputing all fits, so the result must be -1"
_AHEAD = "min(pipeline_parallel_size - rank - 1, num_microbatches)"
_LAST = "range(num_microbatches - ahead, num_microbatches)"
_FEW = "start backwards as soon as the first gradient comes back. 1F1B holds p − r microbatches on rank r, at most n"
_PASSES = "(chunk, first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p)"
_IN_TURN = "p microbatches go through one chunk, then the same p through the next chunk"
_PLACES = "a microbatch's backward frees its place for the next one"
MISTAKES = {
    "5.1": f"""
        rank - 1, num -> rank, num | a rank runs one forward too many ahead, p − r, and so holds one microbatch too many: run p − r − 1 ahead
        pipeline_parallel_size - rank - 1 -> max(pipeline_parallel_size - rank - 2, 0) | one forward too few comes before the first backward, so a rank waits: run p − r − 1 ahead, then a forward before each backward
        {_AHEAD} -> pipeline_parallel_size - rank - 1 | with fewer microbatches than ranks the warm-up runs microbatches that don't exist: min(p − r − 1, n)
        ("B", i - ahead)] -> ("B", i)] ;; {_LAST} -> reversed(range(ahead)) | the latest microbatch's backward runs first: backwards come in the order of the microbatches
        return order + [("B", i) for i in {_LAST}] -> return [(kind, i + 1) for kind, i in order + [("B", i) for i in {_LAST}]] | microbatches are numbered from 1; they begin at 0
        {_AHEAD} -> min(1, {_AHEAD}) | every rank but the last runs one forward ahead; rank r needs p − r − 1
        {_AHEAD} -> max(0, min(pipeline_parallel_size - rank - 1, num_microbatches - 2)) | with few microbatches too few forwards run ahead: min(p − r − 1, n)
        {_AHEAD} -> num_microbatches | every rank runs all forwards first and holds all microbatches: {_FEW}
        pipeline_parallel_size - rank - 1, -> pipeline_parallel_size - 1, | every rank runs equally many forwards ahead; rank r needs p − r − 1 of them, the last rank none
        {_AHEAD} -> min(rank, num_microbatches) | the later a rank is, the more forwards it runs ahead; it is the other way round: rank r runs p − r − 1
        {_AHEAD} -> 0 | no rank runs a forward ahead, so each waits for the backward of every microbatch: rank r runs p − r − 1 before its first backward
        {_LAST} -> reversed({_LAST}) | the last backwards run in reverse: backwards come in the order of the microbatches
        {_LAST} -> () | the last backwards are missing: as many are left as forwards ran ahead
    """,
    "5.2": f"""
        forwards = [("F", chunk, i) for chunk, i in passes] -> forwards = [("F", chunk, i) for chunk in range(m) for i in range(n)] | all microbatches go through one chunk before any goes through the next: {_IN_TURN}
        2 * (p - rank - 1) -> 2 * rank | the later a rank is, the more forwards it runs ahead; it is the other way round: 2(p − r − 1) + (m − 1)p
        m - 1 - chunk, i) for -> m - 1 - chunk, i // p * p + p - 1 - i % p) for | of p microbatches that go through a chunk together, the last comes back first: backwards come in the order of the forwards
        (m - 1) * p -> m * p | a rank runs p forwards too many ahead: 2(p − r − 1) + (m − 1)p
        {_PASSES} -> (chunk, i) for chunk in range(m) for i in range(n) ;; min(2 * (p - rank - 1) + (m - 1) * p, n * m) -> n * m | all microbatches go through one chunk before any goes through the next, forwards first: {_IN_TURN}
        {_PASSES} -> (chunk, i) for chunk in range(m) for i in range(n) | all microbatches go through one chunk before any goes through the next: {_IN_TURN}
        {_PASSES} -> (chunk, i) for chunk in range(m) for i in range(n) ;; (m - 1) * p -> (m - 1) * n | all microbatches go through one chunk before any goes through the next: {_IN_TURN}
        ("F", chunk, i) -> ("F", chunk * p + rank, i) ;; ("B", m - 1 - chunk, i) -> ("B", (m - 1 - chunk) * p + rank, i) | chunks are numbered over the whole model, c·p + r; a rank's own are 0 to m − 1
        first + i) for first -> i) for first | each group of p microbatches is numbered from 0 again: the k-th group begins at k·p
        ahead = min( -> ahead = n * m if n == p else min( | where n = p all forwards run first, as in Megatron-LM; later ranks then hold more than they need
        {_PASSES} -> (chunk, i) for i in range(n) for chunk in range(m) | each microbatch goes through all chunks before the next one: {_IN_TURN}
        m - 1 - chunk, i) for chunk, i in passes -> m - 1 - chunk, i) for i in range(n) for chunk in range(m) | the backwards take each microbatch through all chunks before the next one: {_IN_TURN}, from the last chunk to the first
        ("B", m - 1 - chunk, i) -> ("B", chunk, i) | backwards begin with the last chunk: they run in the reverse order of chunks
        2 * (p - rank - 1) + (m - 1) * p -> (m - 1) * p | a rank runs (m − 1)p forwards before its first backward, and lacks 2(p − r − 1): the first gradient is as many steps away
        2 * (p - rank - 1) + (m - 1) * p -> 2 * (p - rank - 1) | a rank runs 2(p − r − 1) forwards before its first backward, and lacks (m − 1)p: a microbatch goes through all chunks first
        2 * (p - rank - 1) + (m - 1) * p -> p - rank - 1 | a rank runs p − r − 1 forwards before its first backward, as without chunks: it needs 2(p − r − 1) + (m − 1)p
        2 * (p - rank - 1) + (m - 1) * p -> m * p | every rank runs equally many forwards ahead; rank r needs 2(p − r − 1) + (m − 1)p
        min(2 * (p - rank - 1) + (m - 1) * p, n * m) -> n * m | every rank runs all forwards first: it needs 2(p − r − 1) + (m − 1)p of them before its first backward
        min(2 * (p - rank - 1) + (m - 1) * p, n * m) -> min(2 * (p - rank - 1) + (m - 1) * p + 1, n * m) | a rank runs one forward too many ahead: 2(p − r − 1) + (m − 1)p
        (m - 1) * p, n * m) -> (m - 1) * p - 1, n * m) | a rank runs one forward too few ahead: 2(p − r − 1) + (m − 1)p
        backwards[n * m - ahead :] -> backwards[n * m - ahead :][::-1] | the last backwards run in reverse: they go on in the order of the others
    """,
    "5.3": """
        output.untyped_storage().resize_(0) -> output.data = output.data.to("meta") | the tensor must stay on its device: make its storage smaller, and leave the tensor as it is
        output.untyped_storage().resize_(0) -> output.data = torch.empty(1, dtype=output.dtype) | the output has another shape now: backward compares the gradient's shape with it and refuses. Empty the tensor's storage and leave the tensor itself as it is
    """,
    "5.5": f"""
        return kept -> return [i for i in range(num_microbatches) if i not in kept] | these are the microbatches that are recomputed: return the others
        len(taken) < places -> len(taken) <= places | one microbatch too many holds a place at once: take a place only while fewer than places are taken
        taken.discard(i) -> pass | no place becomes free again: {_PLACES}
        elif len(taken) < places: -> else: | all microbatches are kept, however few places there are
        one_forward_one_backward(pipeline_parallel_size, rank, num_microbatches): -> one_forward_one_backward(pipeline_parallel_size, pipeline_parallel_size - 1 - rank, num_microbatches): | rank r holds p − r microbatches at once, not r + 1
        taken.discard(i) -> taken.discard(i - 1) | a place becomes free one microbatch late: a microbatch's own backward frees its place
        len(taken) < places -> len(taken) + 1 < places | one place is never used: take one while fewer than places are taken
        len(taken) < places -> len(taken) < min(places, 1) | one place is used, however many there are
        return kept -> return [i for i in range(num_microbatches) if places and i % places == 0] | every places-th microbatch is kept; what counts is how many hold a place at once
        len(taken) < places -> i % pipeline_parallel_size < places | rank r holds p − r microbatches at once, not p: take a place whenever one is free
        len(taken) < places -> len(taken) < max(places, 1) | where there are no places, no microbatch can keep everything
    """,
    "5.4": f"""
        in_flight * recomputed_bytes -> recomputed_bytes | one recomputed microbatch is taken off the budget; all in flight keep recomputed_bytes
        , full_bytes - recomputed_bytes -> , full_bytes | what is left is divided by full_bytes: a microbatch that keeps everything takes only full_bytes − recomputed_bytes more
        min(in_flight, left // more) -> left // more | no more than in_flight can keep everything: min(in_flight, …)
        min(in_flight, left // more) -> min(in_flight - 1, left // more) | all in flight may keep everything, not all but one
        return min(in_flight, left // more) -> return (in_flight if budget_bytes // in_flight >= full_bytes else 0) | either all keep everything or none: some may, while the others are recomputed
        `{_SAVES}` ->  | if full_bytes is recomputed_bytes, you divide by 0: recomputing saves nothing there, so all in flight can keep everything
        {_FIT} -> budget_bytes // full_bytes) | budget // full_bytes leaves no room for what the recomputed ones keep
        return -1 -> return min(in_flight, budget_bytes // full_bytes) ;; {_FIT} -> budget_bytes // full_bytes) | budget // full_bytes leaves no room for what the recomputed ones keep
        {_WHOLE_FIT} -> in_flight if in_flight * full_bytes <= budget_bytes else max(0, (budget_bytes - recomputed_bytes) // full_bytes) | recomputed_bytes are counted once: count them for each recomputed microbatch
        {_WHOLE_FIT} -> (lambda k: k if budget_bytes - k * full_bytes >= (in_flight - k) * recomputed_bytes else 0)(min(in_flight, budget_bytes // full_bytes)) | where budget // full_bytes leaves too little for the others, the result is 0: try fewer that keep everything
        left < 0 -> left < more | -1 is for a budget in which not even recomputing all fits; where none can keep everything the result is 0
        {_WHOLE_FIT} -> min(in_flight - 1, left // more if more else in_flight) | all in flight may keep everything, not all but one
        {_WHOLE_FIT} -> in_flight - (min(in_flight, left // more) if more else in_flight) | this is how many are recomputed: return how many keep everything
        left // more -> budget_bytes // more | what the recomputed ones keep is not taken off the budget: divide budget_bytes − in_flight · recomputed_bytes
        min(in_flight, left // more) -> (in_flight - min(in_flight, left // more)) | this is how many are recomputed: return how many keep everything
        return -1 -> return 0 | {_NONE_FITS}
        if left < 0: -> if False: | {_NONE_FITS}
        if left < 0 -> if left <= 0 ;; left // more -> (left - 1) // more | {_EXACTLY}
        min(in_flight, left // more) -> max(0, min(in_flight, (left - 1) // more)) | {_EXACTLY}
        left // more -> left // more + 1 | one too many: the last one that keeps everything does not fit any more
        left // more -> int(left / more) | / makes a float, which is rounded where numbers are large: divide with //
        left // more -> -(-left // more) | the quotient is rounded up, and there is no room for the last one: round down
    """,
}
