"""Rows of a whole rank against closed forms and against a schedule walked action by action."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import Parallel
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.first_stage import (
    EMBEDDING_TERM,
    HEAD_TERMS,
    bytes_by_rank,
    eq5,
    eq6,
    first_stage_bytes,
    interleave_factor,
    layers_per_chunk,
    section43_extras,
    stage_extra_rows,
    stage_output_rows,
    stage_rows,
)
from actmem.formulas.schedule import held
from actmem.models import PAPER_MODELS
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import extra_rows, paper_rows, total
from actmem_course.others import paper
from tests.formulas.cuts import model_cuts
from tests.formulas.test_first_stage import schedule_of

MODES = st.sampled_from(RECOMPUTE_MODES)
ELEMENT_SIZES = st.sampled_from([2, 4, 8])


def peak_by_schedule(shape, parallel, rank, n, layer_bytes, embedding_bytes, head_bytes):
    """The most that a rank holds at once, added up action by action."""
    per_chunk, p = layers_per_chunk(shape, parallel) * layer_bytes, parallel.pipeline_parallel_size

    def weight(action):
        first = rank == 0 and action.chunk == 0
        last = rank == p - 1 and action.chunk == parallel.num_model_chunks - 1
        return per_chunk + first * embedding_bytes + last * head_bytes

    return max(held(schedule_of(parallel, n)[rank], weight))


@given(model_cuts(), MODES, ELEMENT_SIZES)
def test_stage_rows_are_the_peak_of_the_schedule(cut, recompute, e):
    shape, parallel, n = cut
    _, b, h, s = shape.letters()
    t = parallel.tensor_parallel_size
    sbh = s * b * h // parallel.sequence_parts
    head = 2 * e * sbh + max(e, 4) * s * b * shape.vocab_size // t
    layer = total(layer_rows(shape, parallel, recompute, e))
    for rank in range(parallel.pipeline_parallel_size):
        peak = peak_by_schedule(shape, parallel, rank, n, layer, sbh, head)
        assert total(stage_rows(shape, parallel, rank, recompute, n, e)) == peak


@given(model_cuts(), MODES, ELEMENT_SIZES, st.sampled_from(["cpu", "cuda"]))
def test_stage_extra_rows_are_the_peak_of_the_schedule(cut, recompute, e, device):
    shape, parallel, n = cut
    tokens = shape.seq_length * shape.micro_batch_size
    cut_by = parallel.sequence_parts
    head = 4 * tokens + 2 * tokens * (max(e, 4) if device == "cuda" else e) // cut_by
    of_layer = [r for r in layer_extra_rows(shape, parallel, recompute, e, device) if r.term != "causal mask"]
    for rank in range(parallel.pipeline_parallel_size):
        rows = stage_extra_rows(shape, parallel, rank, recompute, n, e, device)
        assert extra_rows(rows) == rows
        assert total(rows) == peak_by_schedule(shape, parallel, rank, n, total(of_layer), 4 * tokens, head)


@given(model_cuts(), MODES)
def test_layers_of_the_first_stage(cut, recompute):
    shape, parallel, n = cut
    rows = stage_rows(shape, parallel, 0, recompute, n)
    assert paper_rows(rows) == rows
    layers = [row for row in rows if row.term not in (EMBEDDING_TERM, *HEAD_TERMS)]
    assert total(layers) == first_stage_bytes(shape, parallel, recompute, n)


@pytest.mark.parametrize("model", PAPER_MODELS.values(), ids=PAPER_MODELS)
def test_first_stage_of_the_papers_models(model):
    """Equation 5 or 6, times the interleave factor, plus section 4.3, which counts p embedding
    masks where interleaving holds 2p."""
    shape, parallel = model.shape, model.parallel
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    extras = section43_extras(shape, t, p)
    if m > 1:
        _, b, h, s = shape.letters()
        extras += p * s * b * h // t
    n = model.global_batch_size // shape.micro_batch_size
    factor = interleave_factor(p, m)
    assert total(stage_rows(shape, parallel, 0, "none", n)) == eq5(shape, t) * factor + extras
    assert total(stage_rows(shape, parallel, 0, "selective", n)) == eq6(shape, t) * factor + extras


def test_figure_9():
    """Outputs, as the paper counts them: not divided by t, so t times what one rank keeps."""
    model = PAPER_MODELS["530B"]
    t, p = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
    parallel = Parallel(t, True, p)
    freed = bytes_by_rank(model.shape, parallel, "selective")
    kept = bytes_by_rank(model.shape, parallel, "selective", free_outputs=False)
    assert len(freed) == len(kept) == p
    saved = [more - less for more, less in zip(kept, freed)]
    assert round(Fraction(saved[0] * t, 2**30), 2) == Fraction(str(paper.FIGURE9_SAVED_GB))
    assert saved[-1] == 0  # the last stage sends nothing on
    # One microbatch less a rank: a straight line, with a spike from the embedding on rank 0.
    steps = [a - b for a, b in zip(freed, freed[1:])]
    assert len(set(steps[1:-1])) == 1
    _, b, h, s = model.shape.letters()
    assert steps[0] - steps[1] == s * b * h * p // t


@given(model_cuts(), ELEMENT_SIZES)
def test_outputs_are_those_of_chunks_that_send(cut, e):
    shape, parallel, n = cut
    _, b, h, s = shape.letters()
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    size = e * s * b * h // parallel.sequence_parts
    for rank, actions in enumerate(schedule_of(parallel, n)):
        in_last = held(actions, lambda action: int(rank == p - 1 and action.chunk == m - 1))
        # At the fullest moment that also holds the model's last chunk, if this rank has it.
        everything, last = max(zip(held(actions), in_last))
        rows = stage_output_rows(shape, parallel, rank, n, e)
        assert total(rows) == (everything - last) * size
