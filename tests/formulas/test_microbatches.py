"""Microbatch-level recomputation: what fits, and never a byte above the budget."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import ConfigError, Parallel
from actmem.formulas.activations import layer_bytes
from actmem.formulas.first_stage import capacity, in_flight, layers_per_chunk, stage_rows
from actmem.formulas.schedule import held, moving_window, one_forward_one_backward, recomputed_share
from actmem.formulas.states import state_rows
from actmem.models import PAPER_MODELS, TINY
from actmem.rows import paper_rows, total
from actmem_course.others import paper
from tests.formulas.cuts import model_cuts
from tests.formulas.test_first_stage import schedule_of

MODES = st.sampled_from(["selective", "full"])


@given(model_cuts(), MODES, st.data())
def test_never_above_the_budget_and_never_room_for_one_more(cut, recompute, data):
    shape, parallel, n = cut
    rank = data.draw(st.integers(0, parallel.pipeline_parallel_size - 1))
    least = total(paper_rows(stage_rows(shape, parallel, rank, recompute, n)))
    most = total(paper_rows(stage_rows(shape, parallel, rank, "none", n)))
    budget = data.draw(st.integers(least, most + 1))
    places = capacity(shape, parallel, budget, rank, n, recompute)

    actions = schedule_of(parallel, n)[rank]
    keep = set(moving_window(actions, places))
    layers = layers_per_chunk(shape, parallel)
    sizes = {mode: layers * layer_bytes(shape, parallel, mode) for mode in ("none", recompute)}
    in_layers = held(actions, lambda a: sizes["none" if (a.chunk, a.microbatch) in keep else recompute])
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
    actions = one_forward_one_backward(p, n)[rank]
    in_flight_here = min(p - rank, n)
    kept = [microbatch for _, microbatch in moving_window(actions, places)]
    assert kept == [i for i in range(n) if i % in_flight_here < places]
    assert recomputed_share(places, in_flight_here, n) == 1 - Fraction(len(kept), n)


def test_figure_10():
    """p = 4, nine microbatches: later stages have fewer in flight, so more of them fit."""
    p, n = paper.FIGURE10_PIPELINE_PARALLEL_SIZE, paper.FIGURE10_NUM_MICROBATCHES
    ranks = one_forward_one_backward(p, n)
    kept = [[microbatch for _, microbatch in moving_window(actions, 2)] for actions in ranks]
    assert kept == [[0, 1, 4, 5, 8], [0, 1, 3, 4, 6, 7], list(range(9)), list(range(9))]


@pytest.mark.parametrize("model", ["175B", "530B"])
def test_the_papers_models_fit_more_towards_the_end(model):
    """Within 80 GiB the first rank recomputes some and the last none."""
    chosen = PAPER_MODELS[model]
    n = chosen.global_batch_size // chosen.shape.micro_batch_size
    missing = []
    for rank in range(chosen.parallel.pipeline_parallel_size):
        budget = paper.A100_BYTES - total(state_rows(chosen.shape, chosen.parallel, rank))
        missing.append(in_flight(chosen.parallel, rank, n) - capacity(chosen.shape, chosen.parallel, budget, rank, n))
    assert missing[0] > 0 and missing[-1] == 0
    assert missing == sorted(missing, reverse=True)


def test_refuses_a_budget_that_nothing_fits():
    least = total(paper_rows(stage_rows(TINY, Parallel(), recompute="full")))
    assert capacity(TINY, Parallel(), least, recompute="full") == 0
    with pytest.raises(ConfigError) as error:
        capacity(TINY, Parallel(), least - 1, recompute="full")
    assert str(error.value) == f"budget_bytes: rank 0 needs {least:,} with recompute = 'full', got {least - 1:,}"
