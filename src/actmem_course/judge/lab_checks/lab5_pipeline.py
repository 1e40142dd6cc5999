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

from actmem.formulas import schedule
from actmem.formulas.first_stage import stage_output_rows
from actmem.formulas.microbatches import moving_window
from actmem.formulas.schedule import one_forward_one_backward, peak_in_flight
from actmem.models import PAPER_MODELS
from actmem.rows import total
from actmem_course.judge.compare import close, grad_of
from actmem_course.judge.lab_checks.lab5_orders import run_on_paper
from actmem_course.judge.reward import BarsReward, Measure, Reward
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.others.timeline import bubble_of, draw, timeline


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
                f"{case}: {sorted(found)} are {most} at once; a place becomes free only after the backward of the microbatch that holds it"
            )
        flight = min(p - rank, n)
        best = sum(i % flight < places for i in range(n))
        if len(found) < best:
            if len(found) <= places < best:
                raise Wrong(
                    f"{case}: {sorted(found)} never give up their places; a microbatch's backward frees its place for the next one: {best} can keep everything"
                )
            raise Wrong(
                f"{case}: {sorted(found)} are {len(found)}, and {best} can keep everything: take a place whenever one is free"
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
