"""Equations 5 and 6 with a pipeline: closed forms against the paper's, and against real schedules."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from actmem.config import ConfigError, Parallel
from actmem.formulas.activations import layer_bytes, layer_rows
from actmem.formulas.first_stage import (
    bubble_fraction,
    embeddings_in_flight,
    eq5,
    eq6,
    first_stage_bytes,
    full_recompute_bytes,
    in_flight,
    interleave_factor,
    section43_extras,
    selective_saves,
)
from actmem.formulas.schedule import held, interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.models import PAPER_MODELS
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import total
from actmem_course.others import paper
from tests.formulas.cuts import layer_cuts, model_cuts


def schedule_of(parallel, n, per_round=None):
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    return one_forward_one_backward(p, n) if m == 1 else interleaved(p, m, n, per_round)


@given(layer_cuts(), st.sampled_from(RECOMPUTE_MODES), st.sampled_from([2, 4, 8]))
def test_layer_bytes_are_the_sum_of_the_rows(cut, recompute, e):
    shape, parallel = cut
    assert layer_bytes(shape, parallel, recompute, e) == total(layer_rows(shape, parallel, recompute, e))


@given(model_cuts())
def test_equations_5_and_6_as_printed(cut):
    shape, parallel, _ = cut
    t, L = parallel.tensor_parallel_size, shape.num_layers
    a, b, h, s = shape.letters()
    assert eq5(shape, t) == Fraction(s * b * h * L, t) * (34 + Fraction(5 * a * s, h))
    assert eq6(shape, t) == Fraction(34 * s * b * h * L, t)
    assert full_recompute_bytes(shape, t) == 2 * s * b * h * L
    assert full_recompute_bytes(shape, t, sharded_inputs=True) == Fraction(2 * s * b * h * L, t)
    assert selective_saves(shape) == 1 - Fraction(eq6(shape, t), eq5(shape, t))


@given(model_cuts())
def test_first_stage_is_equation_5_or_6_times_the_interleave_factor(cut):
    """Whatever p is, and exactly: nothing is rounded."""
    shape, parallel, _ = cut
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    parallel = Parallel(t, True, p, m)
    factor = 1 + Fraction(p - 1, p * m) if m > 1 else 1
    assert interleave_factor(p, m) == factor
    assert first_stage_bytes(shape, parallel) == eq5(shape, t) * factor
    assert first_stage_bytes(shape, parallel, "selective") == eq6(shape, t) * factor
    assert first_stage_bytes(shape, parallel, "full") == full_recompute_bytes(shape, t, sharded_inputs=True) * factor


@given(model_cuts())
def test_in_flight_is_what_the_schedule_holds(cut):
    _, parallel, n = cut
    for rank, actions in enumerate(schedule_of(parallel, n)):
        assert in_flight(parallel, rank, n) == max(held(actions))


@given(model_cuts())
def test_without_a_number_there_are_enough_microbatches(cut):
    _, parallel, _ = cut
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    assert in_flight(parallel) == (p if m == 1 else p * m + p - 1) == in_flight(parallel, 0, 2 * p)
    assert embeddings_in_flight(parallel) == (p if m == 1 else 2 * p) == embeddings_in_flight(parallel, 2 * p)


@given(model_cuts())
def test_embeddings_in_flight_are_held_while_the_rank_is_at_its_fullest(cut):
    _, parallel, n = cut
    actions = schedule_of(parallel, n)[0]
    in_first = held(actions, lambda action: int(action.chunk == 0))
    assert embeddings_in_flight(parallel, n) == max(in_first)
    assert (max(held(actions)), max(in_first)) in zip(held(actions), in_first)


@given(p=st.integers(2, 6), m=st.integers(2, 3), n=st.integers(1, 20))
def test_torchs_rounds(p, m, n):
    """torch takes rounds of other than p microbatches where p does not divide n."""
    parallel = Parallel(pipeline_parallel_size=p, num_model_chunks=m)
    try:
        g = torch_microbatches_per_round(p, n)
    except ConfigError:
        assert n % (n // p)
        return
    ranks = interleaved(p, m, n, g)
    assert [in_flight(parallel, rank, n, g) for rank in range(p)] == [max(held(actions)) for actions in ranks]
    assert embeddings_in_flight(parallel, n, g) == max(held(ranks[0], lambda action: int(action.chunk == 0)))
    if n % p == 0:
        assert g == p and ranks == interleaved(p, m, n)


def test_extras_as_printed():
    """(sbhL/t)(p/L + δ(p=1)(4/L)(1 + v/h))."""
    for model in PAPER_MODELS.values():
        shape, t, p = model.shape, model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
        _, b, h, s = shape.letters()
        L, v = shape.num_layers, shape.vocab_size
        ends = Fraction(4, L) * (1 + Fraction(v, h)) if p == 1 else 0
        assert section43_extras(shape, t, p) == Fraction(s * b * h * L, t) * (Fraction(p, L) + ends)


def test_section_5_percentages():
    for model, percent in paper.SECTION5_SAVED_PERCENT.items():
        shape = PAPER_MODELS[model].shape
        assert round(100 * selective_saves(shape)) == percent
        core = Fraction(5 * shape.num_attention_heads * shape.seq_length, shape.hidden_size)
        assert core == paper.SECTION5_CORE_COEFFICIENT[model]


def test_bubble_of_the_papers_models():
    assert [bubble_fraction(m.parallel, m.global_batch_size // m.shape.micro_batch_size) for m in PAPER_MODELS.values()] == [
        0, Fraction(7, 64 * 3), Fraction(34, 280 * 3), Fraction(63, 512)
    ]  # fmt: skip
