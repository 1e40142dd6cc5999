"""Split backward passes: the same actions as torch's classes, valid, in flight and idle as the papers say."""

import re
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import eq1
from actmem.formulas.schedule import (
    Action,
    held,
    interleaved,
    one_forward_one_backward,
    peak_in_flight,
    stage_at,
    torch_microbatches_per_round,
)
from actmem.models import PAPER_MODELS
from actmem.rows import total
from actmem_course.others.timeline import Span, bubble_of, memory_curve, timeline, validate
from actmem_course.others.zero_bubble import (
    dual_pipe_v,
    v_half,
    v_min,
    weight_gradient_rows,
    zero_bubble_h1,
    zero_bubble_v,
)

#: Forward, whole backward, and the "W" in it, none shorter than W: 2401.10241's formula holds there.
TIMES = [(1, 2, 1), (2, 4, 2), (2, 5, 2), (3, 5, 2)]


def torch_actions(schedule, p, n, rank, m=2):
    """What torch's class runs on one rank, as text with its names: I is a backward without its W, B a whole one."""
    rounds = max(1, n // p)
    numbers: Any = SimpleNamespace(
        pp_group_size=p, _n_microbatches=n, num_stages=m * p, n_local_stages=m, microbatches_per_round=n // rounds
    )
    found = [str(action) for action in schedule._calculate_single_rank_operations(numbers, rank) if action is not None]
    # "5F2" is stage 5 and microbatch 2; a pair that may overlap is one entry with both in it.
    return [(int(s), kind, int(i)) for text in found for s, kind, i in re.findall(r"(\d+)([FIWB])(\d+)", text)]


def in_torchs_names(ranks, rank, v_shaped=False):
    split = {(a.chunk, a.microbatch) for a in ranks[rank] if a.kind == "W"}
    return [
        (
            stage_at(rank, a.chunk, len(ranks), v_shaped),
            "I" if a.kind == "B" and (a.chunk, a.microbatch) in split else a.kind,
            a.microbatch,
        )
        for a in ranks[rank]
    ]


@given(p=st.integers(2, 6), m=st.integers(1, 4), n=st.integers(1, 20))
def test_torch_runs_the_same_zb_h1(p, m, n):
    try:
        g = torch_microbatches_per_round(p, n)
    except ConfigError:
        return  # torch refuses these too: its rounds must divide n
    ours = zero_bubble_h1(p, n, m, g)
    for rank in range(p):
        theirs = torch_actions(torch_schedules.ScheduleInterleavedZeroBubble, p, n, rank, m)
        assert in_torchs_names(ours, rank) == theirs


@given(p=st.integers(1, 7), n=st.integers(1, 30))
def test_torch_runs_the_same_zb_v(p, n):
    ours = zero_bubble_v(p, n)
    for rank in range(p):
        theirs = torch_actions(torch_schedules.ScheduleZBVZeroBubble, p, n, rank)
        assert in_torchs_names(ours, rank, v_shaped=True) == theirs


@given(p=st.integers(1, 7), more=st.integers(0, 12))
def test_torch_runs_the_same_dual_pipe_v(p, more):
    n = 2 * p + more
    ours = dual_pipe_v(p, n)
    for rank in range(p):
        theirs = torch_actions(torch_schedules.ScheduleDualPipeV, p, n, rank)
        assert in_torchs_names(ours, rank, v_shaped=True) == theirs


@given(p=st.integers(1, 8), n=st.integers(1, 20), times=st.sampled_from(TIMES))
def test_zb_h1_holds_what_1f1b_holds_and_idles_less(p, n, times):
    forward, backward, w = times
    ranks, plain = zero_bubble_h1(p, n), one_forward_one_backward(p, n)
    validate(ranks, n)
    assert peak_in_flight(ranks) == [min(p, n)] * p
    # Between forward and backward it is 1F1B: rank r has r more that wait for their "W".
    assert [max(held(actions, until_weight=lambda action: 0)) for actions in ranks] == peak_in_flight(plain)
    if n >= p:
        spans = timeline(ranks, forward, backward, weight_time=w)
        # (p − 1)(F + B − W), and "backward" is B + W.
        assert bubble_of(spans) == Fraction((p - 1) * (forward + backward - 2 * w), n * (forward + backward))
        assert bubble_of(timeline(plain, forward, backward)) == Fraction(p - 1, n)


@given(p=st.integers(2, 6), m=st.integers(2, 4), rounds=st.integers(1, 4))
def test_interleaved_zero_bubble(p, m, rounds):
    n = p * rounds
    ranks = zero_bubble_h1(p, n, m)
    validate(ranks, n, m)
    assert peak_in_flight(ranks) == [m * p] * p  # p microbatches' bytes, without the interleave factor
    assert bubble_of(timeline(ranks)) == Fraction(p - 1, 3 * m * n)
    without = [[a for a in actions if a.kind != "W"] for actions in ranks]
    assert without == interleaved(p, m, n, short_warmup=True)


@given(p=st.integers(1, 8), more=st.integers(0, 12))
def test_zb_v_never_idles_between_its_first_and_last_action(p, more):
    n = 2 * p - 1 + more
    ranks = zero_bubble_v(p, n)
    validate(ranks, n, 2, v_shaped=True)
    spans = timeline(ranks, v_shaped=True)
    for rank in range(p):
        own = [span for span in spans if span.rank == rank]
        assert all(a.end == b.start for a, b in zip(own, own[1:]))
        assert own[0].start == rank
    # Each chunk is half of a 1F1B stage.
    assert peak_in_flight(ranks) == [2 * p] * p
    assert bubble_of(spans) == Fraction(p - 1, 6 * n)


@given(p=st.integers(1, 6), n=st.integers(1, 12))
def test_zb_v_runs_with_few_microbatches(p, n):
    ranks = zero_bubble_v(p, n)
    validate(ranks, n, 2, v_shaped=True)
    assert all(peak <= min(2 * p, 2 * n) for peak in peak_in_flight(ranks))


@given(p=st.integers(1, 8), more=st.integers(0, 12))
def test_dual_pipe_v(p, more):
    n = 2 * p + more
    ranks = dual_pipe_v(p, n)
    validate(ranks, n, 2, v_shaped=True)
    for actions in ranks:  # some backwards are whole, some are split
        assert 0 < sum(action.kind == "W" for action in actions) < 2 * n
    assert peak_in_flight(ranks) == [2 * p + 1] * p  # DeepSeek's "PP + 1", for PP = 2p stages
    assert bubble_of(timeline(ranks, v_shaped=True)) == Fraction(p - 1, 6 * n)


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_w_needs_32_sbh(name):
    """2401.10241 table 1: 32sbh bytes, less than what a forward leaves, so W's waiting adds nothing to the peak."""
    shape = PAPER_MODELS[name].shape
    _, b, h, s = shape.letters()
    assert total(weight_gradient_rows(shape)) == 32 * s * b * h < eq1(shape)


@given(t=st.sampled_from([1, 2, 4, 8]), sequence_parallel=st.booleans(), e=st.sampled_from([2, 4, 8]))
def test_what_w_needs_on_each_of_t_ranks(t, sequence_parallel, e):
    shape = ModelShape(16, 3, 32, 8)
    _, b, h, s = shape.letters()
    parallel = Parallel(t, sequence_parallel and t > 1)
    whole = 0 if parallel.sequence_parallel else 4  # two inputs and two gradients, each e·sbh
    assert total(weight_gradient_rows(shape, parallel, e)) == whole * e * s * b * h + (16 - whole) * e * s * b * h // t


@given(p=st.integers(1, 6), n=st.integers(1, 12))
def test_bytes_change_at_b_and_at_w(p, n):
    layer, kept = 100, 70
    for actions in zero_bubble_h1(p, n):
        curve = held(actions, lambda action: layer, lambda action: kept)
        counts = [0, 0]  # forwards without a backward, backwards without their "W"
        for action, size in zip(actions, curve):
            counts[0] += {"F": 1, "B": -1, "W": 0}[action.kind]
            counts[1] += {"F": 0, "B": 1, "W": -1}[action.kind]
            assert size == counts[0] * layer + counts[1] * kept
        assert counts == [0, 0]


@given(p=st.integers(1, 5), n=st.integers(2, 9))
def test_memory_over_time_ends_empty_and_peaks_where_the_order_does(p, n):
    ranks = zero_bubble_v(p, n)
    spans = timeline(ranks, v_shaped=True)
    for rank in range(p):
        curve = memory_curve(spans, rank, lambda action: 10 + action.chunk, lambda action: 7)
        assert max(size for _, size in curve) == max(
            held(ranks[rank], lambda action: 10 + action.chunk, lambda action: 7)
        )
        assert curve[-1][1] == 0


def test_a_split_backward_takes_as_long_as_a_whole_one():
    spans = timeline(zero_bubble_h1(1, 1), 2, 5, weight_time=2)
    assert spans == [Span(0, 0, 2, Action("F", 0, 0, 0)), Span(0, 2, 5, Action("B", 0, 0, 0)), Span(0, 5, 7, Action("W", 0, 0, 0))]  # fmt: skip


def test_sends_to_the_same_rank_take_no_time():
    """The V turns on the last rank, and its middle stages are neighbours there."""
    assert timeline(zero_bubble_v(1, 1), v_shaped=True) == timeline(zero_bubble_v(1, 1), send_time=5, v_shaped=True)
    ends = [max(s.end for s in timeline(zero_bubble_v(2, 1), send_time=q, v_shaped=True)) for q in (0, 1)]
    assert ends[1] - ends[0] == 4  # of three hops forward and three back, the one at the turn is free


FAULTS = [
    (lambda r: r[1].insert(0, Action("W", 1, 0, 0)), "rank 1 runs W0 before its backward"),
    (lambda r: r[0].append(Action("W", 0, 0, 1)), "rank 0 runs W1 twice"),
    (lambda r: r[0].append(Action("X", 0, 0, 1)), "rank 0: kind must be F, B or W, got 'X'"),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_the_first_fault_is_named(spoil, message):
    ranks = zero_bubble_h1(2, 3)
    spoil(ranks)
    with pytest.raises(ConfigError) as error:
        validate(ranks, 3)
    assert str(error.value) == f"schedule: {message}"


# V-Min and V-Half: valid, and every rank's peak and the idle time by closed form.


@given(make=st.sampled_from([v_min, v_half]), p=st.integers(1, 12), n=st.integers(1, 12))
def test_they_run(make, p, n):
    ranks = make(p, n)
    validate(ranks, n, 2, v_shaped=True)
    assert all(len(actions) == 6 * n for actions in ranks)
    assert max(peak_in_flight(ranks)) <= 2 * n


@pytest.mark.parametrize("p", range(1, 20))
def test_peaks_are_the_papers(p):
    """2405.15362's (p + 4)//3 and (p + 2)//2 microbatches; a chunk is half of 1F1B's stage."""
    n = 2 * p + 4
    lean, half = peak_in_flight(v_min(p, n)), peak_in_flight(v_half(p, n))
    assert max(lean) == 2 * ((p + 4) // 3)
    assert half == [2 * ((p + 2) // 2)] * p  # on every rank alike
    assert set(lean) <= {max(lean), max(lean) - 2}
    assert peak_in_flight(one_forward_one_backward(p, n))[0] == p


@pytest.mark.parametrize("p", range(1, 20))
def test_idle_time(p):
    """In units of one action, F = B = W = 1; 1F1B over the same stages idles 6(p − 1)."""
    n = 2 * p + 4
    working = 6 * n
    lean = max(0, 4 * p - 5 + (2 if p % 3 == 0 else 0))
    half = max(0, (7 * p - (9 if p % 2 else 8)) // 2)
    assert bubble_of(timeline(v_min(p, n), v_shaped=True)) == Fraction(lean, working)
    assert bubble_of(timeline(v_half(p, n), v_shaped=True)) == Fraction(half, working)
    plain = timeline(one_forward_one_backward(p, n), 2, 4)
    assert bubble_of(plain) == Fraction(6 * (p - 1), working)
    # The paper says two thirds of 1F1B's and a little, and about a half, which this order misses by a twelfth.
    assert lean <= 4 * (p - 1) + 1
    assert 12 * half <= 7 * 6 * (p - 1)


@pytest.mark.parametrize("make", [v_min, v_half])
@pytest.mark.parametrize("p", range(1, 13))
def test_the_middle_has_no_gap(make, p):
    """From one microbatch to the next the end moves by six units: the idle time is at the two ends only."""
    ends = [max(span.end for span in timeline(make(p, n), v_shaped=True)) for n in range(2 * p, 2 * p + 4)]
    assert [b - a for a, b in zip(ends, ends[1:])] == [6, 6, 6]
