"""What to do with each term: no other actions are better, and a layer that takes them keeps what was predicted."""

from itertools import chain, combinations, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from actmem.config import TINY, ConfigError, ModelShape, Parallel, model_shape
from actmem.drop import Store
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_matmuls
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.layer_rows import layer_rows_of
from actmem.ledger.recorder import record
from actmem.recipes import PAPER_LAYER, LayerTerms, Recipe
from actmem.rows import LAYER_TERMS, Row, compare, on_device, on_host, total
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape
from actmem_more.per_tensor_choices import PricedLayer, Rates, choices, frontier, recompute_choices
from actmem_more.store import EightBits, HostMemory

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
    price = layer_matmuls(TINY)
    fewest: dict[int, int] = {}
    for dropped in every_set():
        kept = sum(size for term, size in sizes.items() if term not in dropped)
        flops = sum(price[product] for product in PAPER_LAYER.recomputed_matmuls(dropped))
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
        points = {choice.matmuls: choice for choice in frontier(every, by_flops)}
        statistics = set(PAPER_LAYER.statistics)
        assert points[("QKᵀ",)].actions.keys() == PAPER_LAYER.dropped("elementwise") | statistics
        assert points[("QKᵀ",)].bytes == total(layer_rows(shape, parallel, "elementwise"))
        last = list(points.values())[-1]
        assert last.actions.keys() == set(LAYER_TERMS[1:]) | statistics
        assert last.bytes == total(layer_rows(shape, parallel, "full"))


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
    last_matmuls={},
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
        again = sum(layer.flops[name] for name in SMALL.recomputed_matmuls(mode))
        copy = host / (512 * link)
        seconds = again + max(0, copy - forward) + max(0, copy - 2 * forward - again)
        best[kept] = min(seconds, best.get(kept, seconds))
    line = frontier(choices(layer, allowed), lambda choice: choice.seconds(rates))
    for budget in [*sorted(best)[:: max(1, len(best) // 12)], sum(row.bytes for row in rows)]:
        chosen = next(choice for choice in line if choice.bytes <= budget)  # the cheapest that fits
        assert chosen.seconds(rates) == min(seconds for kept, seconds in best.items() if kept <= budget)
        assert chosen.bytes <= budget and chosen.bytes == total(on_device(rows, SMALL, chosen.actions, 2))
    assert line[-1].bytes == min(best)


def test_one_action_may_come_without_a_tuple():
    layer = PricedLayer.of(PAPER, element_size=4)
    alone = choices(layer, "offload")
    assert alone == choices(layer, ("offload",)) and any(choice.host_bytes for choice in alone)


def gradients(layer, shape):
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    layer(x.requires_grad_()).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("shape", [PAPER, LLAMA], ids=["paper", "today"])
def test_a_layer_keeps_what_each_choice_on_the_line_says_and_has_the_same_gradients(shape):
    layer = PricedLayer.of(shape, element_size=4)
    forward = sum(layer.flops.values()) / 1e9
    rates = Rates(1e9, total(layer.rows) / forward / 8, forward)  # an eighth can move while forward runs
    line = frontier(choices(layer, BOTH), lambda choice: choice.seconds(rates))
    assert len(line) > 5 and line[0].host_bytes
    assert line[-1].bytes == min(choice.bytes for choice in choices(layer, BOTH))

    def made(actions="none"):
        if shape is PAPER:
            stores: dict[str, Store] = {"offload": HostMemory(), "compress": EightBits()}
            return TransformerLayer(shape, seed=3, recompute=actions, stores=stores)
        return LlamaLayer(shape, seed=3, recompute=actions)

    wanted = gradients(made(), shape)
    for choice in line:
        found = gradients(made(choice.actions), shape)
        assert all(torch.equal(*two) for two in zip(found, wanted))
        size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
        measured = layer_rows_of(made(choice.actions), torch.randn(size).requires_grad_())
        rows = on_device(layer.rows, layer.terms, choice.actions, 4)
        assert choice.bytes == total(rows)
        predicted = [*rows, *on_host(layer.rows, layer.terms, choice.actions)]
        missing = [row for row in measured if row.term in {row.term for row in predicted}]
        assert compare(predicted, missing).exact
        assert {row.term for row in measured} - {row.term for row in predicted} <= {"causal mask"}


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda layer, rates: choices(layer, ("ofload",)), "allowed: must be one of keep, recompute"),
        (lambda layer, rates: Rates(0, 1, 1), "flops: must be above 0"),
        (lambda layer, rates: Rates(1, float("nan"), 1), "host_bytes: must be above 0"),
        (lambda layer, rates: Rates(1, 1, -1), "forward: must be at least 0"),
    ],
)
def test_refuses(call, rule):
    with pytest.raises(ConfigError, match=f"^{rule}"):
        call(PricedLayer.of(PAPER), Rates(1, 1, 0))


SHAPE = LlamaShape(128, 2, 64, 4, 4, 176)
ATEN = torch.ops.aten
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu
#: torch's counter has no row for the kernel on CPUs.
COUNTED = {ATTENTION: lambda q, k, v, *rest, out_val=None, **options: sdpa_flop_count(q, k, v)}


class PlainToday(nn.Module):
    """Today's layer as one writes it for a single device: ``[b, s, h]``."""

    def __init__(self):
        super().__init__()
        h, f = SHAPE.hidden_size, SHAPE.ffn_hidden_size
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.q, self.k, self.v, self.projection = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((h, f), (h, f), (f, h)))

    def forward(self, x):
        y = self.norm1(x)
        heads = (self.q(y), self.k(y), self.v(y))
        q, k, v = (x.unflatten(2, (SHAPE.num_attention_heads, -1)).transpose(1, 2) for x in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(y)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def counted():
    return FlopCounterMode(display=False, custom_mapping=COUNTED)


def random_input():
    return torch.randn(SHAPE.micro_batch_size, SHAPE.seq_length, SHAPE.hidden_size).requires_grad_()


def selective(layer, saved):
    """The same if torch's selective checkpoint saves the results of these operations."""

    def policy(context, operation, *args, **options):
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    with counted() as counter:
        with record(layer) as ledger:
            y = checkpoint(
                layer, random_input(), use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )  # fmt: skip
        y.sum().backward()
    return ledger.total_bytes, counter.get_total_flops()


#: By FLOPs for each byte, the most first.
ORDER = (ATTENTION.default, ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.silu.default, ATEN.mul.Tensor)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("saved", [ORDER[:number] for number in range(len(ORDER) + 1)] + [ORDER[1:3]], ids=len)
def test_a_selective_checkpoint_keeps_no_less_for_less(saved):
    kept, flops = selective(PlainToday(), saved)
    with counted() as counter:
        PlainToday()(random_input()).sum().backward()
    line = frontier(recompute_choices(PricedLayer.of(SHAPE, element_size=4)), by_flops)
    ours = [choice for choice in line if choice.bytes <= kept]
    assert ours and ours[0].flops <= flops - counter.get_total_flops()
