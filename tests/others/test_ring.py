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
    assert states[-1].sent_bytes == PredictedCollective(kind, "forward", t, payload).wire_bytes
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
