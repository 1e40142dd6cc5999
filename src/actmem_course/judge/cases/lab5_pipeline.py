"""Lab 5: its cases, the functions that test a learner's answers."""

from weakref import ref

import torch
import torch.nn.functional as F

from actmem.config import ConfigError
from actmem.formulas import schedule
from actmem.formulas.schedule import Action, Schedule, peak_in_flight
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, check_whole_number, dtype_name
from actmem_course.judge.observations import Clue
from actmem_course.judge.verdict import Wrong, refuse
from actmem_course.others.timeline import timeline, validate
from actmem_tools.command_line import counted

#: Cases of 5.4: budget in bytes, microbatches in flight, bytes of one that saves everything and of one that recomputes.
BUDGETS = (
    (100, 4, 30, 10), (60, 4, 30, 10), (40, 4, 30, 10), (39, 4, 30, 10), (10**6, 4, 30, 10), (119, 4, 30, 10),
    (85, 3, 40, 7), (100, 4, 10, 10), (30, 4, 10, 10),
    (2**62 + 39, 4, 2**60 + 10, 10),  # one byte too few for four, which a float can't tell
)  # fmt: skip


def _see_orders(r: CaseRun, *sizes: tuple[int, int, int]) -> None:
    """Note every rank's order and what it costs, for sizes (p ranks, n microbatches, m chunks on each rank).

    Raises: Wrong if the ranks can't run an order.
    """
    cases = {}
    for p, n, m in sizes:
        case = f"{counted(p, 'rank')}, {counted(m, 'chunk')}, {counted(n, 'microbatch')}".replace("1 chunk, ", "")
        cases[case] = on_paper(r, p, n, m), n, m
        r.see(Clue(f"{case}: the order", cases[case][0]))
    for case, (ranks, n, m) in cases.items():
        _see_costs(r, case, ranks, n, m)


def _see_costs(r: CaseRun, case: str, ranks: Schedule, n: int, chunks: int) -> None:
    """Note, as costs, how long an order takes and how many microbatches each rank holds.

    Any order is right that takes no longer than ours and holds no more.
    """
    swapped = chunks > 1 and all(a.chunk < n and a.microbatch < chunks for actions in ranks for a in actions)
    if swapped and any(a.chunk >= chunks for actions in ranks for a in actions):
        raise Wrong(f"{case}: chunk and microbatch are swapped", 'in ("F", c, i) the chunk comes before the microbatch')
    for rank, actions in enumerate(ranks):
        if (forwards := sum(action.kind == "F" for action in actions)) > n * chunks:
            there = f"there are {n * chunks}: no more can run ahead"
            raise Wrong(f"{case}: rank {rank} runs {forwards} forwards", there)
    try:
        validate(ranks, n, chunks)
    except ConfigError as error:
        raise Wrong(f"{case}: {error.rule}") from None
    end = max(span.end for span in timeline(ranks))
    r.see_cost(f"{case}: takes {{found}} units of time where {{enough}} are possible", end)
    for rank, held in enumerate(peak_in_flight(ranks)):
        r.see_cost(f"{case}: rank {rank} holds {{found}} microbatches at once, where {{enough}} are enough", held)


def on_paper(r: CaseRun, p: int, n: int, chunks: int = 1) -> Schedule:
    """Call the learner's function for every rank, and return the whole schedule: for each rank a list of actions.

    Args:
        r: the run of the case, which has the learner's functions.
        p: how many pipeline ranks there are.
        n: how many microbatches there are.
        chunks: model chunks on each rank; 1 calls ``one_forward_one_backward``, more call ``interleaved``.

    Raises: Wrong if the function returns no list, or if an entry isn't ("F", i) or ("B", i); with several chunks,
        ("F", c, i) or ("B", c, i).
    """
    orders = [
        r["one_forward_one_backward"](p, k, n) if chunks == 1 else r["interleaved"](p, k, chunks, n) for k in range(p)
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


def one_forward_one_backward(r: CaseRun) -> None:
    _see_orders(r, (1, 3, 1), (2, 4, 1), (4, 8, 1), (4, 4, 1), (4, 2, 1), (3, 7, 1))


def interleaved(r: CaseRun) -> str:
    """Judge the learner's interleaved schedules.

    Returns: a remark if fewer forward passes run ahead than in our schedule, which is right as long as sends take no
        time; else "".
    """
    _see_orders(r, (2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 2))
    longer = peak_in_flight(schedule.interleaved(4, 2, 8))[0] > peak_in_flight(on_paper(r, 4, 8, 2))[0]
    ahead = "2(p − r − 1) + (m − 1)p forwards ahead hide them, as Megatron-LM does"
    return f"right where sends take no time; {ahead}" if longer else ""


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
    r.see_tensor("the stage's input", leaf, "free only the output")
    shape = "backward compares the gradient's shape with it"
    r.see_value("the output's shape", list(output.shape), as_it_is, shape)
    r.see_value("the output's dtype", dtype_name(output), as_it_is)
    another = f"the tensor has another storage now, as large as the first, {size} B"
    held = "did you free a copy's, or does something hold it? Zeros take as much, and del drops only a name"
    if left == size and first() is not None:
        raise Wrong(f"the output's {size} B are still there", "free its storage (untyped_storage)", held)
    refuse((
        (output.grad_fn is not graph, "the output has lost its graph", "free its memory, leave the tensor as it is"),
        (left == size, another, "free the storage that it had"),
        # A single element, expanded to all, is as good.
        (left > output.element_size(), f"{left} of the output's {size} B are still there", "free all"),
    ))  # fmt: skip
    output.backward(upstream)
    only = "free only the output's memory, not what backward reads"
    r.see_tensor("the gradient of the stage's input", leaf.grad, only, gradient_of="the stage's input")


def how_many_fit(r: CaseRun) -> None:
    for budget, flight, full, recomputed in BUDGETS:
        case = f"budget {budget} B, {flight} in flight, {full} B or {recomputed} B each"
        try:
            r.see_number(case, r["how_many_fit"](budget, flight, full, recomputed))
        except ZeroDivisionError:
            if full != recomputed:
                raise
            r.see_value(f"{case}: the result", "a division by zero")
