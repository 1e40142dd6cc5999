"""What to do with each term: no other actions are better, and a layer that takes them keeps what was predicted."""

from itertools import chain, combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_products
from actmem.layers.llama import LlamaLayer
from actmem.layers.transformer import TransformerLayer
from actmem.llama_shape import LlamaShape
from actmem.measure import layer_rows_of
from actmem.models import TINY, model_shape
from actmem.plan.actions import PricedLayer, Rates, cheapest, choices, frontier, recompute_choices
from actmem.recipes import PAPER_LAYER, LayerTerms, Recipe
from actmem.rows import LAYER_TERMS, Row, compare, on_device, on_host, total

PAPER = ModelShape(seq_length=32, micro_batch_size=2, hidden_size=24, num_attention_heads=4, vocab_size=1)
LLAMA = LlamaShape(12, 3, 32, 8, 2, 40)
BOTH = ("recompute", "offload")


def by_flops(choice):
    return choice.flops


def every_set():
    together = set(PAPER_LAYER.one_tensor)
    alone = [recipe.term for recipe in PAPER_LAYER.recipes if recipe.term not in together]
    for terms in chain.from_iterable(combinations(alone, n) for n in range(len(alone) + 1)):
        yield set(terms)
        yield set(terms) | together


def test_no_set_of_recomputed_terms_is_better():
    sizes = {row.term: row.bytes for row in layer_rows(TINY)}
    price = layer_products(TINY)
    fewest: dict[int, int] = {}
    for dropped in every_set():
        kept = sum(size for term, size in sizes.items() if term not in dropped)
        flops = sum(price[product] for product in PAPER_LAYER.products_again(dropped))
        fewest[flops] = min(kept, fewest.get(flops, kept))
    best, wanted = sum(sizes.values()) + 1, []
    for flops, kept in sorted(fewest.items()):
        if kept < best:
            best = kept
            wanted.append((kept, flops))
    line = frontier(recompute_choices(PricedLayer.of(TINY)), by_flops)
    assert [(choice.bytes, choice.flops) for choice in line] == wanted


def test_the_modes_lie_where_they_should():
    shape = model_shape("175B")
    for parallel in (Parallel(), Parallel(8), Parallel(8, True)):
        every = recompute_choices(PricedLayer.of(shape, parallel))
        assert len(every) == 2**5
        points = {choice.products: choice for choice in frontier(every, by_flops)}
        statistics = set(PAPER_LAYER.statistics)
        assert points[("QKᵀ",)].actions.keys() == PAPER_LAYER.dropped("elementwise") | statistics
        assert points[("QKᵀ",)].bytes == total(layer_rows(shape, parallel, "elementwise"))
        last = list(points.values())[-1]
        assert last.actions.keys() == set(LAYER_TERMS[1:]) | statistics and last.bytes == total(
            layer_rows(shape, parallel, "full")
        )


SMALL = LayerTerms(
    "in",
    (
        Recipe("a", ("in",)),
        Recipe("b", ("a",), ("P",)),
        Recipe("c", ("a",), ("P",)),
        Recipe("d", ("b", "c"), ("Q",)),
        Recipe("e", ("d",)),
    ),
    core=frozenset(),
    core_elementwise=True,
    last_products={},
    one_tensor=("b", "c"),
    other_dtype=frozenset({"e"}),
)
NAMES = ["in", "a", "b", "c", "d", "e"]


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6), flops=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    forward=st.integers(0, 9), link=st.integers(1, 4), compress=st.booleans(),
)  # fmt: skip
def test_no_actions_at_all_are_better(sizes, flops, forward, link, compress):
    """Every action for every term, tried one by one."""
    rows = tuple(Row(name, 512 * size) for name, size in zip(NAMES, sizes))
    layer = PricedLayer(SMALL, rows, dict(zip("PQ", flops)))
    rates = Rates(1, 512 * link, forward)
    allowed = ("keep", "recompute", "offload", *(("compress",) if compress else ()))
    best: dict[int, float] = {}
    for actions in product(allowed, repeat=len(NAMES)):
        mode = {name: action for name, action in zip(NAMES, actions) if action != "keep"}
        try:
            kept, host = total(on_device(rows, SMALL, mode, 2)), total(on_host(rows, SMALL, mode))
        except ConfigError:
            continue
        again = sum(layer.flops[name] for name in SMALL.products_again(mode))
        copy = host / (512 * link)
        seconds = again + max(0, copy - forward) + max(0, copy - 2 * forward - again)
        best[kept] = min(seconds, best.get(kept, seconds))
    for budget in [*sorted(best)[:: max(1, len(best) // 12)], sum(row.bytes for row in rows)]:
        chosen = cheapest(layer, budget, rates, allowed)
        assert chosen.seconds(rates) == min(seconds for kept, seconds in best.items() if kept <= budget)
        assert chosen.bytes <= budget and chosen.bytes == total(on_device(rows, SMALL, chosen.actions, 2))
    if not min(best):
        return
    with pytest.raises(ConfigError, match=f"^budget: the layer keeps at least {min(best):,} B, got"):
        cheapest(layer, min(best) - 1, rates, allowed)


def gradients(layer, shape):
    x = torch.randn(
        shape.seq_length, shape.micro_batch_size, shape.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    layer(x.requires_grad_()).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("shape", [PAPER, LLAMA], ids=["paper", "today"])
def test_a_layer_keeps_what_each_choice_on_the_line_says_and_has_the_same_gradients(shape):
    layer = PricedLayer.of(shape, element_size=4)
    forward = sum(layer.flops.values()) / 1e9
    rates = Rates(1e9, total(layer.rows) / forward / 8, forward)  # an eighth can move while forward runs
    line = frontier(choices(layer, BOTH), lambda choice: choice.seconds(rates))
    assert (
        len(line) > 5 and line[0].host_bytes and line[-1].bytes == min(choice.bytes for choice in choices(layer, BOTH))
    )
    kind = TransformerLayer if shape is PAPER else LlamaLayer
    wanted = gradients(kind(shape, seed=3), shape)
    for choice in line:
        assert all(
            torch.equal(*two) for two in zip(gradients(kind(shape, seed=3, recompute=choice.actions), shape), wanted)
        )
        size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
        measured = layer_rows_of(kind(shape, seed=3, recompute=choice.actions), torch.randn(size).requires_grad_())
        rows = on_device(layer.rows, layer.terms, choice.actions, 4)
        assert choice.bytes == total(rows)
        predicted = [*rows, *on_host(layer.rows, layer.terms, choice.actions)]
        missing = [row for row in measured if row.term in {row.term for row in predicted}]
        assert compare(predicted, missing).exact
        assert {row.term for row in measured} - {row.term for row in predicted} <= {"causal mask"}


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda layer, rates: cheapest(layer, -1, rates), "budget: must be at least 0"),
        (lambda layer, rates: cheapest(layer, True, rates), "budget: must be a whole number"),
        (lambda layer, rates: cheapest(layer, 5, rates, "keep"), "budget: the layer keeps at least"),
        (lambda layer, rates: cheapest(layer, 5, rates, ("ofload",)), "allowed: must be one of keep, recompute"),
        (lambda layer, rates: Rates(0, 1, 1), "flops: must be above 0"),
        (lambda layer, rates: Rates(1, float("nan"), 1), "host_bytes: must be above 0"),
        (lambda layer, rates: Rates(1, 1, -1), "forward: must be above 0"),
    ],
)
def test_refuses(call, rule):
    with pytest.raises(ConfigError, match=f"^{rule}"):
        call(PricedLayer.of(PAPER), Rates(1, 1, 0))
