"""The ring: complete in the end, one message a rank and step, and the bytes of the closed form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.formulas.communication import PredictedCollective
from actmem_course.others.ring import PHASES, ring

ranks = st.integers(1, 9)
payloads = st.integers(1, 10**9)


@pytest.mark.parametrize("kind", PHASES)
@given(ranks, payloads)
def test_bytes_are_those_of_the_closed_form(kind, t, payload):
    states = ring(kind, t, payload)
    assert states[-1].sent_bytes == PredictedCollective(kind, "forward", "", t, payload).wire_bytes
    assert len(states) == 1 + len(PHASES[kind]) * (t - 1)


@given(ranks, payloads)
def test_reduce_scatter_leaves_rank_r_with_the_sum_of_chunk_r(t, payload):
    last = ring("reduce-scatter", t, payload)[-1]
    for rank in range(t):
        assert [last.complete(rank, chunk) for chunk in range(t)] == [t == 1 or chunk == rank for chunk in range(t)]


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
@given(ranks, payloads)
def test_the_others_leave_everything_with_everyone(kind, t, payload):
    last = ring(kind, t, payload)[-1]
    assert all(last.complete(rank, chunk) for rank in range(t) for chunk in range(t))


@given(ranks, payloads)
def test_an_all_reduce_is_the_two_halves_one_after_the_other(t, payload):
    whole, first, second = (ring(kind, t, payload) for kind in ("all-reduce", "reduce-scatter", "all-gather"))
    assert whole[:t] == first
    assert [state.received for state in whole[t:]] == [state.received for state in second[1:]]
    assert whole[-1].held == second[-1].held
    assert whole[-1].sent_bytes == first[-1].sent_bytes + second[-1].sent_bytes


@given(st.integers(2, 9), payloads)
def test_no_contribution_is_added_twice(t, payload):
    """Numbers instead of sets: were one added twice, the sum would be too large."""
    numbers = [[10**rank for _ in range(t)] for rank in range(t)]
    states = ring("reduce-scatter", t, payload)
    for before, after in zip(states, states[1:]):
        arriving = [numbers[(rank - 1) % t][after.received[rank]] for rank in range(t)]
        for rank, chunk in enumerate(after.received):
            assert not before.held[(rank - 1) % t][chunk] & before.held[rank][chunk]
            numbers[rank][chunk] += arriving[rank]
    assert all(numbers[rank][rank] == sum(10**r for r in range(t)) for rank in range(t))
