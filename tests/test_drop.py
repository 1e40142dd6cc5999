"""Any set of terms can be dropped: the same gradients bit for bit, the predicted bytes and FLOPs."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.drop import RecipeSource, Terms
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.communication import layer_exchanges
from actmem.formulas.flops import hardware_flops
from actmem.layers.llama import LlamaLayer
from actmem.layers.transformer import TransformerLayer
from actmem.llama_shape import LlamaShape
from actmem.measure import census, count_collectives, layer_rows_of
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.recipes import ACTIONS, PAPER_LAYER
from actmem.rows import LAYER_TERMS, compare, on_host, total
from actmem.torch_private import TorchDispatchMode, tree_leaves
from tests.tiers import covering, examples

SHAPE = ModelShape(seq_length=12, micro_batch_size=3, hidden_size=24, num_attention_heads=4, vocab_size=1)
ONE_TENSOR = frozenset(PAPER_LAYER.one_tensor)
ALONE = [*(recipe.term for recipe in PAPER_LAYER.recipes if recipe.term not in ONE_TENSOR), *PAPER_LAYER.statistics]
#: Any set that can be rebuilt.
SETS = st.tuples(st.sets(st.sampled_from(ALONE)), st.sampled_from([set(), ONE_TENSOR])).map(lambda two: two[0] | two[1])
EXACT = st.sampled_from([action for action in ACTIONS if action != "compress"])
IMPOSSIBLE = {(PAPER_LAYER.input, "recompute"), *((term, "offload") for term in PAPER_LAYER.statistics)}
#: An action for each term.
MIXED = st.tuples(st.dictionaries(st.sampled_from([PAPER_LAYER.input, *ALONE]), EXACT), EXACT).map(
    lambda two: {
        term: action
        for term, action in {**two[0], **dict.fromkeys(PAPER_LAYER.one_tensor, two[1])}.items()
        if (term, action) not in IMPOSSIBLE
    }
)


def layer_of(recompute, tp=TensorParallel(), **options: Any):
    return TransformerLayer(SHAPE, tp, recompute=recompute, **{"p": 0.3, "seed": 5, **options})


def random_input(tp=TensorParallel(), dtype=torch.float32):
    s = 12 // tp.sequence_parts
    return torch.randn(s, 3, 24, generator=torch.Generator().manual_seed(tp.rank), dtype=dtype).requires_grad_()


def gradients(recompute, tp=TensorParallel(), **options: Any):
    layer, x = layer_of(recompute, tp, **options), random_input(tp)
    layer(x).square().sum().backward()
    return [x.grad] + [parameter.grad for parameter in layer.parameters()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def differences(dropped, tp=TensorParallel(), dtype=torch.float32):
    """Terms whose bytes are not the predicted ones, on this rank; one more if the census disagrees."""
    parallel = Parallel(tp.size, tp.sequence_parallel)
    predicted = layer_rows(SHAPE, parallel, dropped, dtype.itemsize)
    predicted += layer_extra_rows(SHAPE, parallel, dropped, dtype.itemsize)
    predicted += on_host(layer_rows(SHAPE, parallel, "none", dtype.itemsize), PAPER_LAYER, dropped)
    layer = layer_of(dropped, tp, dtype=dtype)
    measured = layer_rows_of(layer, random_input(tp, dtype))
    comparison = compare(predicted, measured)
    wrong = [] if comparison.exact else comparison.describe().splitlines()
    counted = census(layer, lambda: random_input(tp, dtype))
    return wrong if counted == total(measured) else [*wrong, f"census {counted}, ledger {total(measured)}"]


@examples(15, at_night=50)
@given(SETS | MIXED)
def test_any_set_gives_the_same_gradients_and_the_predicted_bytes_and_products(dropped):
    with FlopCounterMode(display=False) as counter:
        found = gradients(dropped)
    assert equal(found, gradients("none"))
    assert differences(dropped) == []
    logits = 3 * 2 * 3 * 12 * 24  # the formula counts a whole model, with v = 1
    assert counter.get_total_flops() == hardware_flops(SHAPE, 3, dropped) - logits


def on_ranks(dropped, sequence_parallel, group_of=None):
    group = torch.distributed.new_group(group_of) if group_of else None
    if group_of and torch.distributed.get_rank() not in group_of:
        return [], True, []
    tp = tensor_parallel(group, sequence_parallel=sequence_parallel)
    same = equal(gradients(dropped, tp), gradients("none", tp))
    return differences(dropped, tp), same, unpredicted_exchanges(dropped, tp)


def unpredicted_exchanges(dropped, tp):
    layer, x = layer_of(dropped, tp), random_input(tp)
    with count_collectives() as seen:
        layer(x).sum().backward()
    predicted = layer_exchanges(SHAPE, Parallel(tp.size, tp.sequence_parallel), dropped)
    wanted = {}
    for exchange in predicted:
        wanted[exchange.kind] = wanted.get(exchange.kind, 0) + exchange.count
    counts = {kind: number for kind, number in seen.counts.items() if number}
    return [] if counts == wanted else [counts, wanted]


RANK_SETS = [
    *("elementwise", {"GeLU input"}, {"layer-norm 2 input", "h→4h input"}, set(LAYER_TERMS[1:])),
    dict.fromkeys([*PAPER_LAYER.one_tensor, "layer-norm 1 input", "h→4h input", "softmax dropout mask"], "offload")
    | {"GeLU input": "recompute"},
]


@pytest.mark.parametrize(
    ("size", "dropped", "sequence_parallel", "members"),
    [(4, "elementwise", True, [3, 1])] + covering([2, 4], RANK_SETS, [False, True], [None]),
    ids=lambda s: f"{len(s)} terms" if isinstance(s, (set, dict)) else str(s),
)
def test_on_ranks(pools, size, dropped, sequence_parallel, members):
    for wrong, same, exchanges in pools[size].run(on_ranks, dropped, sequence_parallel, members):
        assert wrong == [] and same and exchanges == []


@pytest.mark.parametrize(
    ("dropped", "rule"),
    [
        ({"GeLU"}, "recompute: 'GeLU' is no term of this layer"),
        ({"GeLU": "offload"}, "recompute: 'GeLU' is no term of this layer"),
        ({"GeLU": "keep"}, "recompute: 'GeLU' is no term of this layer"),
        ({"layer-norm 1 input"}, "recompute: 'layer-norm 1 input' is the layer's input"),
        ({"Q"}, "recompute: Q, K, V are parts of one tensor: drop all of them or none"),
        ({"Q": "offload"}, "recompute: Q, K, V are parts of one tensor: offload all of them or none"),
        ({"Q": "compress", "K": "compress"}, "recompute: 'Q' is a part of one tensor with others: it can't be compressed"),
        ({"MLP dropout mask": "compress"}, "recompute: 'MLP dropout mask' has no elements of the layer's dtype"),
        ({"GeLU input": "elsewhere"}, r"recompute\['GeLU input'\]: must be one of keep, recompute, offload, compress"),
        ({1: "keep"}, "recompute: an action belongs to the name of a term, got 1"),
        ("gelu", "recompute: must be one of none, selective, elementwise, full"),
    ],
)  # fmt: skip
def test_refuses(dropped, rule):
    for refuse in (lambda: layer_of(dropped), lambda: layer_rows(SHAPE, recompute=dropped)):
        with pytest.raises(ConfigError, match=f"^{rule}"):
            refuse()


def test_the_layer_s_recipes_are_those_of_the_table(monkeypatch):
    made = []
    monkeypatch.setattr(Terms, "__exit__", lambda self, *error: made.append(self) or leave(self, *error))
    layer_of(set(LAYER_TERMS[1:]))(random_input())
    (terms,) = made
    named = {PAPER_LAYER.input, *(recipe.term for recipe in PAPER_LAYER.recipes)}

    def sources(term):
        """Terms of the table, through tensors that have no row."""
        found = {source.name for source in terms.recipes[term].sources if isinstance(source, RecipeSource)}
        return set().union(*({name} if name in named else sources(name) for name in found - {"causal mask"}))

    for recipe in PAPER_LAYER.recipes:
        assert sources(recipe.term) == set(recipe.sources), recipe.term


leave = Terms.__exit__


@pytest.mark.parametrize("dropped", ["elementwise", set(LAYER_TERMS[1:])], ids=["elementwise", "all"])
def test_a_retained_graph_gives_the_same_again(dropped):
    layer, x = layer_of(dropped), random_input()
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once) and equal([once], gradients("none")[:1])


def test_frozen_parts_and_no_grad():
    layer = layer_of("elementwise")
    with torch.no_grad():
        assert not layer(random_input()).requires_grad
    reference = layer_of("none")
    for one in (layer, reference):
        one.streams.sharded.manual_seed(1), one.streams.replicated.manual_seed(2)
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("up" in name)
        one(random_input().detach()).square().sum().backward()
    assert torch.equal(layer.mlp.up.weight.grad, reference.mlp.up.weight.grad)


def test_microbatches_in_flight_do_not_mix():
    layer, reference = layer_of("elementwise"), layer_of("none")
    results = []
    for one in (layer, reference):
        inputs = [random_input().detach().mul(i + 1).requires_grad_() for i in range(3)]
        outputs = [one(x) for x in inputs]
        for y in outputs:
            y.square().sum().backward()
        results.append([x.grad for x in inputs] + [p.grad for p in one.parameters()])
    assert equal(*results)


@pytest.mark.parametrize("recompute", ["elementwise", "full", {"attention projection input", "log-sum-exp"}])
def test_nothing_made_again_outlives_its_layer(recompute):
    """What a second run saves must not hold the graph that saved it: such a cycle nobody collects."""
    made: list[weakref.ref] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(weakref.ref(x.untyped_storage()) for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    layer = LlamaLayer(LlamaShape(12, 3, 24, 4, 2, 40), recompute=recompute, seed=5)
    x = random_input()
    y = layer(x)
    with Made():
        y.backward(torch.ones_like(y))
    del y
    left = {storage().data_ptr() for storage in made if storage() is not None}
    there = [x, *layer.parameters()]
    there += [tensor.grad for tensor in there] + list(layer.buffers())  # operations return views of these too
    assert len(made) > len(there) and left <= {tensor.untyped_storage().data_ptr() for tensor in there}
