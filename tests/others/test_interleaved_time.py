"""The closed form of an interleaved step against the simulation, with both warm-ups, and what follows from it."""

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actmem.formulas.schedule import interleaved, peak_in_flight
from actmem_course.others.interleaved_time import interleaved_step_time
from actmem_course.others.timeline import timeline

SIZES = {"p": st.integers(2, 7), "m": st.integers(2, 4), "rounds": st.integers(1, 4)}
TIMES = {"forward": st.integers(1, 9), "backward": st.integers(1, 9), "send": st.integers(0, 12)}


@given(**SIZES, **TIMES, short=st.booleans())
def test_equals_the_simulation(p, m, rounds, forward, backward, send, short):
    """The short warm-up's for every send, the longer one's while a send takes no longer than a pass."""
    assume(short or send <= min(forward, backward))
    n = p * rounds
    spans = timeline(interleaved(p, m, n, short_warmup=short), forward, backward, send)
    assert interleaved_step_time(p, m, n, forward, backward, send, short) == max(span.end for span in spans)


@given(**SIZES, forward=st.integers(1, 9), more=st.integers(0, 9))
def test_the_longer_warm_up_pays_from_the_first_unit_of_a_send(p, m, rounds, forward, more):
    """While sends are free it buys nothing; after that each unit costs less, but for one round on two ranks."""
    n = p * rounds

    def ends(send):
        return [interleaved_step_time(p, m, n, forward, forward + more, send, short) for short in (False, True)]

    assert ends(0)[0] == ends(0)[1]
    long, short = ends(1)
    assert short - long == 2 * (p - 2) + 2 * m * (p - 1) * (rounds - 1)
    assert (long < short) == (n > 2)


@pytest.mark.parametrize("rounds", [2, 5, 40, 1000])
def test_a_send_of_a_share_x_of_a_chunks_forward_lengthens_the_step_by_two_thirds_of_x_at_most(rounds):
    """For B = 2F, however many chunks and ranks; the memory it saves does not depend on the send."""
    for p in (2, 4, 8, 35):
        for m in (2, 3, 4):
            n = p * rounds
            long, short = (interleaved_step_time(p, m, n, 100, 200, 1, short) for short in (False, True))
            ideal = interleaved_step_time(p, m, n, 100, 200)
            assert 0 < Fraction(short - long, ideal) < Fraction(2, 3) / 100
            if p * m * n < 5000:
                held = [peak_in_flight(interleaved(p, m, n, short_warmup=short))[0] for short in (False, True)]
                assert held == [p * m + p - 1, p * m]


@given(**SIZES, **TIMES)
def test_beyond_a_pass_the_longer_warm_up_waits_too_and_stays_ahead(p, m, rounds, forward, backward, send):
    n = p * rounds
    ends = [
        max(span.end for span in timeline(interleaved(p, m, n, short_warmup=short), forward, backward, send))
        for short in (False, True)
    ]
    assert ends[0] <= ends[1]
