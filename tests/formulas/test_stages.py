"""Equations 5 and 6 and a whole rank's rows: closed forms against the paper's, and against schedules walked action by action."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import PAPER_MODELS, TINY, ConfigError, Parallel
from actmem.formulas import schedule
from actmem.formulas.activations import layer_bytes, layer_extra_rows, layer_rows
from actmem.formulas.stages import (
    EMBEDDING_TERM,
    HEAD_TERMS,
    bubble_fraction,
    capacity,
    embeddings_in_flight,
    eq5,
    eq6,
    in_flight,
    interleave_factor,
    layers_per_chunk,
    selective_saves,
    stage_output_rows,
    stage_rows,
)
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import extra_rows, paper_rows, total
from actmem_course.others.timeline import validate
from tests.shapes import model_cuts


def schedule_of(parallel, n, per_round=None):
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    return schedule.one_forward_one_backward(p, n) if m == 1 else schedule.interleaved(p, m, n, per_round)


@given(model_cuts())
def test_equations_5_and_6_as_printed(cut):
    shape, parallel, _ = cut
    t, L = parallel.tensor_parallel_size, shape.num_layers
    a, b, h, s = shape.letters()
    assert eq5(shape, t) == Fraction(s * b * h * L, t) * (34 + Fraction(5 * a * s, h))
    assert eq6(shape, t) == Fraction(34 * s * b * h * L, t)
    assert selective_saves(shape) == 1 - Fraction(eq6(shape, t), eq5(shape, t))


@given(model_cuts())
def test_first_stage_is_equation_5_or_6_times_the_interleave_factor(cut):
    """Whatever p is, and exactly: nothing is rounded."""
    shape, parallel, _ = cut
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    parallel = Parallel(t, True, p, m)
    factor = 1 + Fraction(p - 1, p * m) if m > 1 else 1
    assert interleave_factor(p, m) == factor
    _, b, h, s = shape.letters()
    inputs = Fraction(2 * s * b * h * shape.num_layers, t)  # section 5
    for recompute, printed in (("none", eq5(shape, t)), ("selective", eq6(shape, t)), ("full", inputs)):
        rows = paper_rows(stage_rows(shape, parallel, 0, recompute))
        assert total(row for row in rows if row.term not in (EMBEDDING_TERM, *HEAD_TERMS)) == printed * factor


@given(p=st.integers(1, 6), m=st.integers(1, 4), g=st.integers(1, 14), rounds=st.integers(1, 4), short=st.booleans())
def test_in_flight_is_what_the_schedule_holds_and_what_cannot_run_is_refused(p, m, g, rounds, short):
    m, n = m if p > 1 else 1, g * rounds
    parallel = Parallel(pipeline_parallel_size=p, num_model_chunks=m)
    if m > 1 and rounds > 1 and g < p - 1:
        with pytest.raises(ConfigError, match=f"^microbatches_per_round: must be at least {p - 1} on {p} ranks"):
            schedule.interleaved(p, m, n, g, short)
        return
    validate(schedule.interleaved(p, m, n, g, short), n, m)
    ranks = schedule_of(parallel, n, g)
    assert [in_flight(parallel, rank, n, g) for rank in range(p)] == schedule.peak_in_flight(ranks)
    # The first rank's embeddings, while it is at its fullest.
    in_first = schedule.held(ranks[0], lambda action: int(action.chunk == 0))
    assert embeddings_in_flight(parallel, n, g) == max(in_first)
    assert (max(schedule.held(ranks[0])), max(in_first)) in zip(schedule.held(ranks[0]), in_first)
    # Without a number there are enough microbatches.
    assert in_flight(parallel) == (p if m == 1 else p * m + p - 1) == in_flight(parallel, 0, 2 * p)
    assert embeddings_in_flight(parallel) == (p if m == 1 else 2 * p) == embeddings_in_flight(parallel, 2 * p)


def test_bubble_of_the_papers_models():
    assert [bubble_fraction(m.parallel, m.global_batch_size // m.shape.micro_batch_size) for m in PAPER_MODELS.values()] == [
        0, Fraction(7, 64 * 3), Fraction(34, 280 * 3), Fraction(63, 512)
    ]  # fmt: skip


MODES = st.sampled_from(RECOMPUTE_MODES)
ELEMENT_SIZES = st.sampled_from([2, 4, 8])


def peak_by_schedule(shape, parallel, rank, n, layer_bytes, embedding_bytes, head_bytes):
    """The most that a rank holds at once, added up action by action."""
    per_chunk, p = layers_per_chunk(shape, parallel) * layer_bytes, parallel.pipeline_parallel_size

    def weight(action):
        first = rank == 0 and action.chunk == 0
        last = rank == p - 1 and action.chunk == parallel.num_model_chunks - 1
        return per_chunk + first * embedding_bytes + last * head_bytes

    return max(schedule.held(schedule_of(parallel, n)[rank], weight))


@given(model_cuts(), MODES, ELEMENT_SIZES, st.sampled_from(["cpu", "cuda"]))
def test_stage_rows_are_the_peak_of_the_schedule(cut, recompute, e, device):
    shape, parallel, n = cut
    _, b, h, s = shape.letters()
    cut_by, tokens = parallel.sequence_parts, s * b
    head = 2 * e * tokens * h // cut_by + max(e, 4) * tokens * shape.vocab_size // parallel.tensor_parallel_size
    more_of_head = 4 * tokens + 2 * tokens * (max(e, 4) if device == "cuda" else e) // cut_by
    layer = layer_bytes(shape, parallel, recompute, e)
    assert layer == total(layer_rows(shape, parallel, recompute, e))
    more = [r for r in layer_extra_rows(shape, parallel, recompute, e, device) if r.term != "causal mask"]
    for rank in range(parallel.pipeline_parallel_size):
        rows = stage_rows(shape, parallel, rank, recompute, n, e, device)
        of_paper = peak_by_schedule(shape, parallel, rank, n, layer, tokens * h // cut_by, head)
        extra = peak_by_schedule(shape, parallel, rank, n, total(more), 4 * tokens, more_of_head)
        assert (total(paper_rows(rows)), total(extra_rows(rows))) == (of_paper, extra)


@given(model_cuts(), ELEMENT_SIZES)
def test_outputs_are_those_of_chunks_that_send(cut, e):
    shape, parallel, n = cut
    _, b, h, s = shape.letters()
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    size = e * s * b * h // parallel.sequence_parts
    for rank, actions in enumerate(schedule_of(parallel, n)):
        in_last = schedule.held(actions, lambda action: int(rank == p - 1 and action.chunk == m - 1))
        # At the fullest moment that also holds the model's last chunk, if this rank has it.
        everything, last = max(zip(schedule.held(actions), in_last))
        rows = stage_output_rows(shape, parallel, rank, n, e)
        assert total(rows) == (everything - last) * size


SHORTER = st.sampled_from(["selective", "full"])


@given(model_cuts(), SHORTER, st.data())
def test_never_above_the_budget_and_never_room_for_one_more(cut, recompute, data):
    shape, parallel, n = cut
    rank = data.draw(st.integers(0, parallel.pipeline_parallel_size - 1))
    least = total(paper_rows(stage_rows(shape, parallel, rank, recompute, n)))
    most = total(paper_rows(stage_rows(shape, parallel, rank, "none", n)))
    budget = data.draw(st.integers(least, most + 1))
    places = capacity(shape, parallel, budget, rank, n, recompute)

    actions = schedule_of(parallel, n)[rank]
    keep = set(schedule.moving_window(actions, places))
    layers = layers_per_chunk(shape, parallel)
    sizes = {mode: layers * layer_bytes(shape, parallel, mode) for mode in ("none", recompute)}
    in_layers = schedule.held(actions, lambda a: sizes["none" if (a.chunk, a.microbatch) in keep else recompute])
    ends = least - in_flight(parallel, rank, n) * sizes[recompute]
    assert max(in_layers) + ends <= budget
    if places < in_flight(parallel, rank, n):
        assert least + (places + 1) * (sizes["none"] - sizes[recompute]) > budget
    else:
        assert len(keep) == len(actions) // 2  # everything fits
        assert most <= budget


@given(p=st.integers(1, 6), n=st.integers(1, 30), places=st.integers(0, 6), data=st.data())
def test_the_window_moves_with_the_period_of_1f1b(p, n, places, data):
    rank = data.draw(st.integers(0, p - 1))
    actions = schedule.one_forward_one_backward(p, n)[rank]
    in_flight_here = min(p - rank, n)
    kept = [microbatch for _, microbatch in schedule.moving_window(actions, places)]
    assert kept == [i for i in range(n) if i % in_flight_here < places]
    assert schedule.recomputed_share(places, in_flight_here, n) == 1 - Fraction(len(kept), n)


def test_refuses_a_budget_that_nothing_fits():
    least = total(paper_rows(stage_rows(TINY, Parallel(), recompute="full")))
    assert capacity(TINY, Parallel(), least, recompute="full") == 0
    with pytest.raises(ConfigError) as error:
        capacity(TINY, Parallel(), least - 1, recompute="full")
    assert str(error.value) == f"budget_bytes: rank 0 needs {least:,} with recompute = 'full', got {least - 1:,}"
