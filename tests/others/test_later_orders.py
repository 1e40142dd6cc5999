"""What the paper's models would have kept under the orders that came later, and which would have fitted."""

from functools import cache

import pytest

from actmem.config import ConfigError
from actmem.formulas.activations import layer_bytes
from actmem.formulas.first_stage import stage_rows
from actmem.formulas.microbatches import activation_budget
from actmem.formulas.schedule import held
from actmem.models import PAPER_MODELS
from actmem.rows import total
from actmem_course.others.later_orders import ORDERS_BY_NAME, THE_PAPERS, order_names, order_needs
from actmem_course.others.paper import A100_BYTES

needs_of = cache(order_needs)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_papers_own_order_holds_what_the_stages_do(name, recompute):
    """By two ways: chunk by chunk along the list of actions, and the closed forms of sections 4.2 and 4.3."""
    model = PAPER_MODELS[name]
    needs = needs_of(name, THE_PAPERS, recompute)
    n = model.global_batch_size // model.shape.micro_batch_size
    for rank in range(model.parallel.pipeline_parallel_size):
        assert needs.held[rank] == total(stage_rows(model.shape, model.parallel, rank, recompute, n))
        assert needs.free[rank] == activation_budget(model.shape, model.parallel, A100_BYTES, rank)


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        ("22B", []),
        ("175B", ["short warm-up", "ZB-H1", "V-Half", "V-Min"]),
        ("530B", ["V-Half", "V-Min"]),
        ("1T", ["V-Half", "V-Min"]),
    ],
)
def test_which_would_have_let_the_papers_models_do_without_recomputation(name, fit):
    assert [order for order in order_names(name) if needs_of(name, order).fits] == fit
    assert needs_of(name, THE_PAPERS, "selective").fits and not needs_of(name).fits


@pytest.mark.parametrize("order", order_names("175B"))
def test_with_selective_recomputation_every_order_fits(order):
    assert all(needs_of(name, order, "selective").fits for name in ("175B", "530B"))


def test_the_short_warm_up_saves_the_interleave_factor():
    model = PAPER_MODELS["175B"]
    p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
    long, short = needs_of("175B"), needs_of("175B", "short warm-up")
    chunk = model.shape.num_layers // (p * m) * layer_bytes(model.shape, model.parallel)
    assert long.held[0] - short.held[0] == (p - 1) * chunk  # the embedding's masks stay
    assert [a - b for a, b in zip(long.held, short.held)] == [(p - 1 - rank) * chunk for rank in range(p)]


def test_on_a_v_rank_0_has_both_ends_parameters_and_the_ranks_between_hold_alike():
    own, on_a_v = needs_of("175B"), needs_of("175B", "V-Half")
    assert on_a_v.free[0] < own.free[0] and set(on_a_v.free[1:]) == {own.free[1]}
    assert sum(on_a_v.free) == sum(own.free)
    assert len(set(on_a_v.held[1:])) == 1


@pytest.mark.parametrize("order", ORDERS_BY_NAME)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 12, 35])
def test_no_rank_holds_more_after_3p_microbatches(order, p):
    """So no more of them are listed; with other bytes in each chunk, and between "B" and "W"."""

    def peaks(n):
        ranks = ORDERS_BY_NAME[order].make(p, n)
        return [max(held(actions, lambda a: 10 + 9 * a.chunk, lambda a: 3 + 2 * a.chunk)) for actions in ranks]

    assert peaks(3 * p) == peaks(4 * p) == peaks(5 * p)


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="model: must be one of 22B, 175B, 530B, 1T, got 'GPT-5'"):
        order_needs("GPT-5")
    with pytest.raises(ConfigError, match="order: must be one of the paper's, got 'V-Half'"):
        order_needs("22B", "V-Half")
    with pytest.raises(ConfigError, match="order: must be one of the paper's, ZB-H1, .*, got 'short warm-up'"):
        order_needs("1T", "short warm-up")
