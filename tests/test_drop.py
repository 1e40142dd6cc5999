"""Any set of terms can be dropped, kept on the host or in eight bits: the same gradients, the predicted bytes and FLOPs."""

import copy
import gc
import itertools
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from actmem import drop
from actmem.config import ConfigError, ModelShape, Parallel
from actmem.drop import NamedForward, Store
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.communication import layer_collectives
from actmem.formulas.flops import hardware_flops
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.census import census
from actmem.ledger.comms import count_collectives
from actmem.ledger.measure_layer import layer_rows_of
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.recipes import ACTIONS, BLOCK, PAPER_LAYER
from actmem.recompute import checkpoint
from actmem.rows import LAYER_TERMS, compare, on_device, on_host, on_the_host, total
from actmem.torch_private import TorchDispatchMode, tree_leaves
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape, input_on_host, llama_layer_terms
from actmem_more.llama_terms import llama_rows
from actmem_more.store import EightBits, HostMemory, eight_bits, from_eight_bits
from tests.layers.test_llama import SHAPES
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


STORES: dict[str, Store] = {"offload": HostMemory(), "compress": EightBits()}


def layer_of(recompute, tp=TensorParallel(), **options: Any):
    return TransformerLayer(SHAPE, tp, recompute=recompute, **{"p": 0.3, "seed": 5, "stores": STORES, **options})


def random_input(tp=TensorParallel(), dtype=torch.float32):
    s = 12 // tp.sequence_parts
    return torch.randn(s, 3, 24, generator=torch.Generator().manual_seed(tp.rank), dtype=dtype).requires_grad_()


def gradients_of(layer, x):
    layer(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


def gradients(recompute, tp=TensorParallel(), **options: Any):
    return gradients_of(layer_of(recompute, tp, **options), random_input(tp))


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
def test_any_set_gives_the_same_gradients_and_the_predicted_bytes_and_matmuls(dropped):
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
    return differences(dropped, tp), same, unpredicted_collectives(dropped, tp)


def unpredicted_collectives(dropped, tp):
    layer, x = layer_of(dropped, tp), random_input(tp)
    with count_collectives() as seen:
        layer(x).sum().backward()
    predicted = layer_collectives(SHAPE, Parallel(tp.size, tp.sequence_parallel), dropped)
    wanted = {}
    for collective in predicted:
        wanted[collective.kind] = wanted.get(collective.kind, 0) + collective.count
    counts = {kind: number for kind, number in seen.counts.items() if number}
    return [] if counts == wanted else [counts, wanted]


RANK_SETS = [
    *("elementwise", {"GeLU input"}, {"layer-norm 2 input", "h→4h input"}, set(LAYER_TERMS[1:])),
    dict.fromkeys([*PAPER_LAYER.one_tensor, "layer-norm 1 input", "h→4h input", "softmax dropout mask"], "offload")
    | {"GeLU input": "recompute"},
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("size", "dropped", "sequence_parallel", "members"),
    [(4, "elementwise", True, [3, 1])] + covering([2, 4], RANK_SETS, [False, True], [None]),
    ids=lambda s: f"{len(s)} terms" if isinstance(s, (set, dict)) else str(s),
)
def test_on_ranks(pools, size, dropped, sequence_parallel, members):
    for wrong, same, collectives in pools[size].run(on_ranks, dropped, sequence_parallel, members):
        assert wrong == [] and same and collectives == []


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
    for refuse in (layer_of, partial(layer_rows, SHAPE, Parallel()), partial(layer_extra_rows, SHAPE, Parallel())):
        with pytest.raises(ConfigError, match=f"^{rule}"):
            refuse(recompute=dropped)


@pytest.mark.parametrize(("name", "also"), [("y", ""), ("x", ""), ("z", "y statistics")])
def test_a_name_of_two_tensors_of_a_forward_pass_is_refused(name, also):
    with NamedForward({"y"}) as terms:
        y = terms("y", torch.sin, terms.input("x", torch.ones(3, requires_grad=True)), by_product="y statistics")
        with pytest.raises(RuntimeError, match=f"^'{also or name}' names two tensors of one forward pass"):
            terms(name, torch.sin, y, by_product=also)


@pytest.mark.parametrize("dropped", ["elementwise", set(LAYER_TERMS[1:])], ids=["elementwise", "all"])
def test_a_retained_graph_gives_the_same_again(dropped):
    layer, x = layer_of(dropped), random_input()
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once) and equal([once], gradients("none")[:1])


@pytest.mark.parametrize(
    "second",
    [torch.ones(4, 3), torch.ones(4, 3).t(), torch.ones(3, 4, dtype=torch.float64)],
    ids=["shape", "stride", "dtype"],
)
def test_a_recipe_that_makes_another_tensor_is_named(second):
    results, weight = iter([torch.ones(3, 4), second]), torch.ones(3, 4, requires_grad=True)
    with NamedForward({"x"}) as terms:
        y = weight * terms("x", lambda: next(results))
    with pytest.raises(RuntimeError, match="x: the second run made .*, the first "):
        y.sum().backward()


class Keeps(torch.autograd.Function):
    """x, with whatever it is told to keep."""

    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * sum(one.sum() for one in ctx.saved_tensors), None, None


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([torch.ones(3, 1), torch.ones(4)], "statistics: the second run made .*, the first "),
        ([torch.ones(3)], "statistics: the second run saved 1 tensors, the first more"),
    ],
)
def test_by_matmuls_of_another_kind_are_named(second, message):
    results, x = iter([[torch.ones(3), torch.ones(4)], second]), torch.ones(3, 4, requires_grad=True)
    with NamedForward({"statistics"}) as terms:
        y = terms("y", lambda x: Keeps.apply(x, *next(results)), terms.input("x", x), by_product="statistics")
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_without_gradients_nothing_is_made_again():
    with torch.no_grad():
        assert not layer_of("elementwise")(random_input()).requires_grad


@pytest.mark.parametrize(
    ("recompute", "trained"),
    [
        ("elementwise", lambda name: "up" in name),
        # No operation saves the layer's input, which the rebuild of each of these reads.
        ({"QKV projection input", "layer-norm 2 input"}, lambda name: "norm1" not in name),
    ],
    ids=["elementwise", "norm"],
)
def test_frozen_parts(recompute, trained):
    gradients = []
    for mode in ("none", recompute):
        layer = layer_of(mode)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(trained(name))
        layer(random_input().detach()).square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters() if parameter.requires_grad])
    assert equal(*gradients)


def test_what_a_recipe_reads_outlives_the_node_that_saved_it():
    """In backward z's node comes first, and alone has saved s, from which d is made again."""
    w, v, x = torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True), torch.arange(3.0)
    with NamedForward({"d"}) as terms:
        s = terms("s", lambda x: x + 1, terms.input("x", x))
        d = terms("d", lambda s: s + 1, s)
        y, z = d * w, s * v
    (y + z).sum().backward()
    assert torch.equal(w.grad, x + 2) and torch.equal(v.grad, x + 1)


def test_terms_end_well_where_a_checkpoint_around_them_stops():
    """The region's last tensor is saved inside a call, before the call's results have their names."""

    def region(x):
        with NamedForward({"y"}) as terms:
            y = terms("y", torch.square, terms.input("x", x))
            return terms("z", lambda y: (y * y).exp(), y).sum()

    gradients = []
    for run in (region, lambda x: checkpoint(region, x)):
        x = torch.linspace(0, 1, 5, requires_grad=True)
        run(x).backward()
        gradients.append([x.grad])
    assert equal(*gradients)


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


LLAMAS = {kind: SHAPES[kind] for kind in ("llama", "qwen3", "mixtral", "deepseek")}
COMPRESSIBLE = [term for term in LAYER_TERMS if term not in PAPER_LAYER.other_dtype | set(PAPER_LAYER.one_tensor)]


def input_of(shape):
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_()


def in_order(tensor):
    """A contiguous copy, as ``save_on_cpu(pin_memory=True)`` makes of what it keeps."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def among_others(tensor):
    """A copy in a storage that holds other numbers too."""
    flat = torch.full((3 * tensor.numel(),), 77).to(tensor.dtype)
    return flat[tensor.numel() : 2 * tensor.numel()].view(tensor.shape).copy_(tensor)


def layers_of(kind, recompute):
    """A layer, its input, and sets and modes that go through every rule of its terms."""
    if kind == "paper":
        return layer_of(recompute, dtype=torch.float64), random_input(dtype=torch.float64)
    x = input_of(LLAMAS[kind]).detach().double().requires_grad_()
    return LlamaLayer(LLAMAS[kind], recompute=recompute, seed=5, dtype=torch.float64), x


def choices_of(kind):
    terms = PAPER_LAYER if kind == "paper" else llama_layer_terms(LLAMAS[kind])
    again = {recipe.term for recipe in terms.recipes} | set(terms.statistics)
    alone = [{term} for term in again - set(terms.one_tensor)]
    offloaded = {recipe.term for recipe in terms.recipes} - terms.by_products
    return ["selective", "elementwise", "full", again, *alone, dict.fromkeys(offloaded, "offload")]


def in_a_checkpoint(layer, x):
    return torch_checkpoint(layer, x, use_reentrant=False)


def under_a_hook(copy_of):
    def run(layer, x):
        with saved_tensors_hooks(copy_of, lambda tensor: tensor):
            return layer(x)

    return run


@pytest.mark.by_day(20)
@pytest.mark.parametrize(
    ("kind", "run", "retain_graph"),
    covering(["paper", *LLAMAS], [under_a_hook(in_order), under_a_hook(among_others), in_a_checkpoint], [False, True]),
)
def test_hooks_outside_may_return_another_layout_or_only_once(kind, run, retain_graph):
    layer, x = layers_of(kind, "none")
    wanted = gradients_of(layer.eval(), x)
    for choice in choices_of(kind):
        layer, x = layers_of(kind, choice)
        y = run(layer.eval(), x).square().sum()
        if retain_graph:
            y.backward(retain_graph=True)
            x.grad = None
            layer.zero_grad()
        y.backward()
        for found, expected in zip((x.grad, *(one.grad for one in layer.parameters())), wanted, strict=True):
            # A product of another layout may add up in another order.
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_in_a_checkpoint_of_torch_a_host_s_copy_is_read_once():
    """A frozen layer's input that only recipes read: each of them fetches it."""
    for recompute in (input_on_host(PAPER_LAYER), {PAPER_LAYER.input: "compress"}):
        layer, x = layer_of(recompute, p=0.0), random_input().detach()
        layer.requires_grad_(False).mlp.down.weight.requires_grad_()
        torch_checkpoint(layer, x, use_reentrant=False).sum().backward()
        once = layer.mlp.down.weight.grad.clone()
        layer(x).sum().backward()
        assert torch.equal(layer.mlp.down.weight.grad, 2 * once)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", LLAMAS)
def test_each_term_of_todays_layer_goes_to_the_host(kind):
    shape, terms = LLAMAS[kind], llama_layer_terms(LLAMAS[kind])
    rows = llama_rows(shape, element_size=4)
    wanted = gradients_of(LlamaLayer(shape, seed=5), input_of(shape))
    names = [terms.input, *(recipe.term for recipe in terms.recipes if recipe.term not in terms.by_products)]
    for actions in [{name: "offload"} for name in names] + [dict.fromkeys(names, "offload")]:
        layer = LlamaLayer(shape, seed=5, recompute=actions)
        measured = layer_rows_of(layer, input_of(shape))
        predicted = on_device(rows, terms, actions, 4) + on_host(rows, terms, actions)
        said = compare(predicted, measured).describe()
        assert said.startswith("all "), (actions, said)
        assert equal(gradients_of(layer, input_of(shape)), wanted), actions


@pytest.mark.parametrize("term", COMPRESSIBLE)
def test_eight_bits_are_the_predicted_bytes_and_the_gradients_of_the_rounded_tensor(term, monkeypatch):
    layer = layer_of({term: "compress"})
    predicted = layer_rows(SHAPE, recompute={term: "compress"}, element_size=4)
    predicted += layer_extra_rows(SHAPE, recompute={term: "compress"}, element_size=4)
    assert compare(predicted, layer_rows_of(layer, random_input())).exact
    assert total(predicted) < total(layer_rows(SHAPE, element_size=4)) + total(layer_extra_rows(SHAPE, element_size=4))
    # A plain layer whose storage of that term is overwritten between forward and backward.
    reference, x, named = layer_of("none"), random_input(), {}
    monkeypatch.setattr(drop, "NAME_READERS", [lambda names, tensors, also: named.update(zip(names, tensors))])
    y = reference(x)
    flat = named[term].data.as_strided((named[term].untyped_storage().nbytes() // 4,), (1,), 0)
    flat.copy_(from_eight_bits(*eight_bits(flat))[: len(flat)])
    y.square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in reference.parameters())]
    assert equal(gradients({term: "compress"}), wanted)
    assert not equal(gradients("none"), wanted)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_an_element_comes_back_within_half_a_step_of_its_block(size):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size)) * torch.arange(size).add(1)
    values, scales = eight_bits(flat)
    back = from_eight_bits(values, scales)[:size]
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        assert (flat[block] - back[block]).abs().max() <= flat[block].abs().max() * (0.5 / 127) * (1 + 1e-5)
    values, scales = eight_bits(torch.zeros(size))
    assert not values.any() and scales.gt(0).all()  # 0 / 0 would be no number


def test_the_window_holds_what_is_on_its_way():
    """In backward the tensors on the device are those being read and ``ahead`` more, whatever the number of layers."""
    arrived = []
    for ahead, layers in itertools.product((1, 2, 5), (2, 6)):
        host = HostMemory(ahead)
        shape = SHAPE.with_sizes(num_layers=layers, vocab_size=8)
        model = GPT(
            shape, recompute={"GeLU input": "offload", "4h→h input": "offload"}, stores={"offload": host}, p=0.0
        )
        most = 0

        def count(grad):
            nonlocal most
            most = max(most, len(host.arriving))

        for layer in model.layers.values():
            layer.register_full_backward_hook(lambda module, grads, outputs: count(grads))
        model(torch.zeros(3, 12, dtype=torch.long)).square().sum().backward()
        arrived.append(most)
        assert not host.arriving
    assert arrived == [1, 1, 2, 2, 2, 5]


def test_backward_in_any_order_fetches_no_more_ahead():
    host = HostMemory(2)
    layer = layer_of({"GeLU input": "offload"}, stores={"offload": host})
    results = [layer(random_input()).sum() for _ in range(12)]
    for first in (1, 0):
        for result in results[first::2]:
            result.backward()
            assert len(host.arriving) <= 2
    del results, result
    assert not host.arriving


def test_a_retained_graph_is_fetched_ahead_again():
    host = HostMemory(1)
    layer = layer_of(dict.fromkeys(("h→4h input", "GeLU input", "4h→h input"), "offload"), stores={"offload": host})
    x, most = random_input(), []
    y = layer(x)
    layer.mlp.down.weight.register_hook(lambda grad: most.append(len(host.arriving)))
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once) and most == [1, 1]


def test_nothing_outlives_a_layer_inside_a_checkpoint():
    """The second run ends at the last tensor that it needs, in the middle of what this engine does."""
    alive = []
    gc.disable()
    try:
        for mode in ("elementwise", set(LAYER_TERMS[1:]), {"GeLU input": "offload"}, {"GeLU input": "compress"}):
            layer, x = layer_of(mode), random_input()
            gc.collect()
            gc.freeze()  # what is there before is listed no more
            generators = [layer.streams.replicated, layer.streams.sharded]
            checkpoint(layer, x, generators=generators).square().sum().backward()
            new = gc.get_objects()
            alive.append(sum(type(one).__name__ in ("Slot", "Kept", "NamedForward", "_HostCopy") for one in new))
            found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
            assert equal(found, gradients(mode))
    finally:
        gc.unfreeze()
        gc.enable()
    assert alive == [0, 0, 0, 0]


def test_a_model_is_copied_and_saved_after_a_step():
    model = GPT(SHAPE, recompute={"GeLU input": "offload"}, stores=STORES, seed=5)
    tokens = torch.zeros(3, 12, dtype=torch.long)
    model(tokens).sum().backward()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(other(tokens), model(tokens)) and other.layers["0"].stores["GeLU input"].ahead == 1


def test_an_input_that_only_a_recipe_reads_goes_to_the_host():
    actions = {LAYER_TERMS[0]: "offload"} | dict.fromkeys(LAYER_TERMS[1:], "recompute")
    layer = layer_of(actions)
    layer.norm1.requires_grad_(False)
    named = {row.term: row.bytes for row in layer_rows_of(layer, random_input().detach())}
    assert LAYER_TERMS[0] not in named and named[on_the_host(LAYER_TERMS[0])] == 12 * 3 * 24 * 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("actions", ["elementwise", {"GeLU input": "offload"}], ids=["elementwise", "offload"])
def test_compiled(actions, backend):
    wanted = gradients("none")
    layer = layer_of(actions)
    assert equal(gradients_of(torch.compile(layer, backend=backend), random_input()), wanted)


def test_the_host_is_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        fetch = HostMemory().put(torch.ones(4, device="cpu"), "x")
    assert torch.equal(fetch(), torch.ones(4))
