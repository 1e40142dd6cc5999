"""Schedules: valid, in flight as known, the bubble as known, and the same as torch's."""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from actmem.config import ConfigError
from actmem.formulas.schedule import (
    Action,
    held,
    interleaved,
    one_forward_one_backward,
    peak_in_flight,
    torch_microbatches_per_round,
)
from actmem_course.others.timeline import bubble_of, memory_curve, timeline, validate
from tests.tiers import covering

TIMES = [(1, 2), (1, 1), (2, 1), (3, 7)]


@st.composite
def interleaved_sizes(draw):
    p = draw(st.integers(1, 6))
    return p, draw(st.integers(1, 4 if p > 1 else 1)), p * draw(st.integers(1, 4))


def torch_actions(order, p, rank):
    """torch's actions of one rank as ours; empty slots and gradient reductions are left out."""
    # The text form, "5F2" for stage 5 and microbatch 2, is the same in every version of torch.
    found = (re.fullmatch(r"(\d+)([FB])(\d+)", str(action)) for action in order)
    return [Action(f[2], rank, int(f[1]) // p, int(f[3])) for f in found if f]


@pytest.mark.parametrize(
    ("p", "m", "n"), [(2, 2, 4), (4, 2, 4), (4, 3, 8), (3, 2, 9), (4, 2, 10), (4, 2, 3), (2, 3, 3), (4, 2, 7)]
)
def test_torch_interleaves_in_the_same_order(p, m, n):
    g = torch_microbatches_per_round(p, n)
    numbers: Any = SimpleNamespace(n_local_stages=m, microbatches_per_round=g, pp_group_size=p, _n_microbatches=n)
    for rank, ours in enumerate(interleaved(p, m, n, g)):
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(numbers, rank)
        assert torch_actions(theirs, p, rank) == ours


@given(interleaved_sizes(), st.sampled_from([(1, 2), (1, 1)]))
def test_bubbles(sizes, times):
    p, m, n = sizes
    assert bubble_of(timeline(interleaved(p, m, n), *times)) == Fraction(p - 1, n * m)
    assert bubble_of(timeline(one_forward_one_backward(p, n + 1), 3, 7)) == Fraction(p - 1, n + 1)


@given(interleaved_sizes(), st.sampled_from(TIMES))
def test_timeline_keeps_every_rule(sizes, times):
    p, m, n = sizes
    spans = timeline(interleaved(p, m, n), *times)
    assert Counter(span.action for span in spans) == Counter(a for actions in interleaved(p, m, n) for a in actions)
    when = {(s.action.kind, s.action.chunk * p + s.rank, s.action.microbatch): s for s in spans}
    for (kind, stage, i), span in when.items():
        assert span.end - span.start == times[kind == "B"]
        neighbour = when.get((kind, stage - 1 if kind == "F" else stage + 1, i))
        assert neighbour is None or neighbour.end <= span.start
        assert kind == "F" or when["F", stage, i].end <= span.start
    for rank in range(p):
        own = [span for span in spans if span.rank == rank]
        assert all(a.end <= b.start for a, b in zip(own, own[1:]))


@given(interleaved_sizes())
def test_memory_over_time_peaks_where_the_order_does(sizes):
    p, m, n = sizes
    ranks = interleaved(p, m, n)
    spans = timeline(ranks)
    for rank in range(p):

        def weight(action):
            return 10 + action.chunk

        curve = memory_curve(spans, rank, weight)
        assert max(value for _, value in curve) == max(held(ranks[rank], weight))
        assert curve[-1] == (max(s.end for s in spans if s.rank == rank), 0)
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})


FAULTS = [
    (lambda r: r[1].remove(Action("B", 1, 0, 2)), "rank 1 never runs B2"),
    (lambda r: r[0].append(Action("F", 0, 0, 1)), "rank 0 runs F1 twice"),
    (lambda r: r[0].insert(0, Action("B", 0, 0, 0)), "rank 0 runs B0 before its forward"),
    (lambda r: r[0].append(Action("F", 0, 0, 3)), "rank 0 has F3, and there is no such pass"),
    (lambda r: r[0].append(Action("F", 0, 1, 0)), "rank 0 has F0 of chunk 1, and there is no such pass"),
    (lambda r: r[0].append(Action("F", 1, 0, 0)), "rank 0 has F0, which belongs to rank 1"),
    (lambda r: r[0].append(replace(r[0][0], kind="X")), "rank 0 has X0: kind must be F or B"),
    (lambda r: r[0].sort(key=lambda a: (a.microbatch, a.kind == "B")), None),
    # Rank 0 waits for B2 before it sends F2's output on: nobody can move.
    (lambda r: (r[1].sort(key=lambda a: (-a.microbatch, a.kind == "B")), r[0].sort(key=lambda a: (a.microbatch, a.kind == "B"))),
     "deadlock, every input is still to come: rank 0 at B0, rank 1 at F2"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_the_first_fault_is_named(spoil, message):
    ranks = one_forward_one_backward(2, 3)
    spoil(ranks)
    if message is None:  # slow, but it runs: one microbatch at a time
        validate(ranks, 3)
        assert peak_in_flight(ranks) == [1, 1]
        return
    with pytest.raises(ConfigError) as error:
        validate(ranks, 3)
    assert str(error.value) == f"schedule: {message}"


@pytest.mark.parametrize(("p", "m", "rounds"), covering([2, 4, 8], [2, 3, 4], [1, 2, 3, 4]))
def test_a_short_warm_up_is_as_fast_while_sends_take_no_time(p, m, rounds):
    n = p * rounds
    long, short = interleaved(p, m, n), interleaved(p, m, n, short_warmup=True)
    validate(short, n, m)
    long_end, short_end = (max(span.end for span in timeline(ranks)) for ranks in (long, short))
    assert long_end == short_end == 3 * n * m + 3 * (p - 1)
    assert peak_in_flight(short)[0] == min(p * m, n * m)
    if rounds > 1:
        assert peak_in_flight(long)[0] == p * m + p - 1
        long_end, short_end = (max(span.end for span in timeline(ranks, 4, 8, 1)) for ranks in (long, short))
        assert long_end < short_end  # what the longer one is for: it hides the sends


def test_a_send_comes_between_two_ranks_and_not_within_one():
    assert max(span.end for span in timeline(one_forward_one_backward(2, 1), 1, 2, 5)) == 2 * (1 + 2) + 2 * 5
    assert timeline(one_forward_one_backward(1, 3), send_time=5) == timeline(one_forward_one_backward(1, 3))
