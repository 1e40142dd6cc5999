"""Terms kept on the host or in eight bits: the predicted bytes on each side, and the gradients of a plain run.

Sets of terms on the host, and ranks, run with those that are recomputed, in ``test_drop``.
"""

import copy
import gc
import itertools
import pickle

import pytest
import torch

from actmem import drop
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.llama_terms import llama_rows
from actmem.layers.gpt import GPT
from actmem.layers.llama import LlamaLayer
from actmem.llama_shape import LatentHeads, LlamaShape, llama_layer_terms
from actmem.measure import layer_rows_of
from actmem.recipes import BLOCK, PAPER_LAYER
from actmem.recompute import checkpoint
from actmem.rows import LAYER_TERMS, compare, on_device, on_host, on_the_host, total
from actmem.store import HostMemory, eight_bits, from_eight_bits
from tests.test_drop import SHAPE, equal, layer_of

LLAMAS = {
    "dense": LlamaShape(12, 3, 32, 8, 2, 40),
    "head norms": LlamaShape(12, 3, 32, 8, 2, 40, 6, qk_norm=True),
    "experts": LlamaShape(12, 3, 32, 8, 2, 40, num_experts=8, experts_per_token=3, num_shared_experts=1),
    "latent": LlamaShape(12, 3, 32, 8, 8, 40, latent=LatentHeads(20, 14, 6, 4, 8)),
}
COMPRESSIBLE = [term for term in LAYER_TERMS if term not in PAPER_LAYER.other_dtype | set(PAPER_LAYER.one_tensor)]


def gradients(layer, x):
    layer(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


def random_input(shape):
    size = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("kind", LLAMAS)
def test_each_term_of_todays_layer_goes_to_the_host(kind):
    shape, terms = LLAMAS[kind], llama_layer_terms(LLAMAS[kind])
    rows = llama_rows(shape, element_size=4)
    wanted = gradients(LlamaLayer(shape, seed=5), random_input(shape))
    names = [terms.input, *(recipe.term for recipe in terms.recipes if recipe.term not in terms.by_products)]
    for actions in [{name: "offload"} for name in names] + [dict.fromkeys(names, "offload")]:
        layer = LlamaLayer(shape, seed=5, recompute=actions)
        measured = layer_rows_of(layer, random_input(shape))
        predicted = on_device(rows, terms, actions, 4) + on_host(rows, terms, actions)
        assert compare(predicted, measured).describe().startswith("all "), (
            actions,
            compare(predicted, measured).describe(),
        )
        assert equal(gradients(layer, random_input(shape)), wanted), actions


@pytest.mark.parametrize("term", COMPRESSIBLE)
def test_eight_bits_are_the_predicted_bytes_and_the_gradients_of_the_rounded_tensor(term, monkeypatch):
    layer = layer_of({term: "compress"})
    predicted = layer_rows(SHAPE, recompute={term: "compress"}, element_size=4)
    predicted += layer_extra_rows(SHAPE, recompute={term: "compress"}, element_size=4)
    assert compare(predicted, layer_rows_of(layer, random_input(SHAPE))).exact
    assert total(predicted) < total(layer_rows(SHAPE, element_size=4)) + total(layer_extra_rows(SHAPE, element_size=4))
    # A plain layer whose storage of that term is overwritten between forward and backward.
    reference, x, named = layer_of("none"), random_input(SHAPE), {}
    monkeypatch.setattr(drop, "NAME_READERS", [lambda names, tensors, also: named.update(zip(names, tensors))])
    y = reference(x)
    flat = named[term].data.as_strided((named[term].untyped_storage().nbytes() // 4,), (1,), 0)
    flat.copy_(from_eight_bits(*eight_bits(flat))[: len(flat)])
    y.square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in reference.parameters())]
    assert equal(gradients(layer_of({term: "compress"}), random_input(SHAPE)), wanted)
    assert not equal(gradients(layer_of("none"), random_input(SHAPE)), wanted)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_an_element_comes_back_within_half_a_step_of_its_block(size):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size)) * torch.arange(size).add(1)
    values, scales = eight_bits(flat)
    back = from_eight_bits(values, scales)[:size]
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        assert (flat[block] - back[block]).abs().max() <= flat[block].abs().max() * (0.5 / 127) * (1 + 1e-5)
    assert torch.equal(from_eight_bits(*eight_bits(torch.zeros(size)))[:size], torch.zeros(size))


def test_the_window_holds_what_is_on_its_way():
    """In backward the tensors on the device are those being read and ``ahead`` more, whatever the number of layers."""
    arrived = []
    for ahead, layers in itertools.product((1, 2, 5), (2, 6)):
        host = HostMemory(ahead)
        shape = SHAPE.with_sizes(num_layers=layers, vocab_size=8)
        model = GPT(shape, recompute={"GeLU input": "offload", "4h→h input": "offload"}, host=host, p=0.0)
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


def test_nothing_on_the_device_but_the_input_of_a_layer_at_work():
    """Everything recomputed and inputs on the host: what a model of any depth keeps on the device is the same."""
    actions = dict.fromkeys(LAYER_TERMS[1:], "recompute") | {LAYER_TERMS[0]: "offload"}
    assert total(layer_rows(SHAPE, recompute=actions)) == 0
    assert total(on_host(layer_rows(SHAPE), PAPER_LAYER, actions)) == total(layer_rows(SHAPE, recompute="full"))
    assert equal(*(gradients(layer_of(mode), random_input(SHAPE)) for mode in (actions, "none")))


def test_backward_in_any_order_fetches_no_more_ahead():
    host = HostMemory(2)
    layer = layer_of({"GeLU input": "offload"}, host=host)
    results = [layer(random_input(SHAPE)).sum() for _ in range(12)]
    for first in (1, 0):
        for result in results[first::2]:
            result.backward()
            assert len(host.arriving) <= 2
    del results, result
    assert not host.arriving


def test_a_retained_graph_is_fetched_ahead_again():
    host = HostMemory(1)
    layer = layer_of(dict.fromkeys(("h→4h input", "GeLU input", "4h→h input"), "offload"), host=host)
    x, most = random_input(SHAPE), []
    y = layer(x)
    layer.mlp.down.weight.register_hook(lambda grad: most.append(len(host.arriving)))
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once) and most == [1, 1]


def test_nothing_outlives_a_layer_inside_a_checkpoint():
    """The second run ends at the last tensor that it needs, in the middle of what this engine does."""
    alive = []
    for mode in ("elementwise", set(LAYER_TERMS[1:]), {"GeLU input": "offload"}, {"GeLU input": "compress"}):
        layer, x = layer_of(mode), random_input(SHAPE)
        gc.collect()
        gc.disable()
        try:
            before = {id(one) for one in gc.get_objects()}
            generators = [layer.streams.replicated, layer.streams.sharded]
            checkpoint(layer, x, generators=generators).square().sum().backward()
            after = [one for one in gc.get_objects() if id(one) not in before]
            alive.append(sum(type(one).__name__ in ("Slot", "Kept", "Terms", "_HostCopy") for one in after))
        finally:
            gc.enable()
        found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        assert equal(found, gradients(layer_of(mode), random_input(SHAPE)))
    assert alive == [0, 0, 0, 0]


def test_a_model_is_copied_and_saved_after_a_step():
    model = GPT(SHAPE, recompute={"GeLU input": "offload"}, seed=5)
    tokens = torch.zeros(3, 12, dtype=torch.long)
    model(tokens).sum().backward()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(other(tokens), model(tokens)) and other.layers["0"].stores["GeLU input"].ahead == 1


def test_an_input_that_only_a_recipe_reads_goes_to_the_host():
    actions = {LAYER_TERMS[0]: "offload"} | dict.fromkeys(LAYER_TERMS[1:], "recompute")
    layer = layer_of(actions)
    layer.norm1.requires_grad_(False)
    named = {row.term: row.bytes for row in layer_rows_of(layer, random_input(SHAPE).detach())}
    assert LAYER_TERMS[0] not in named and named[on_the_host(LAYER_TERMS[0])] == 12 * 3 * 24 * 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("actions", ["elementwise", {"GeLU input": "offload"}], ids=["elementwise", "offload"])
def test_compiled(actions, backend):
    wanted = gradients(layer_of("none"), random_input(SHAPE))
    layer = layer_of(actions)
    assert equal(gradients(torch.compile(layer, backend=backend), random_input(SHAPE)), wanted)


def test_the_host_is_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        fetch = HostMemory().put(torch.ones(4, device="cpu"), "x")
    assert torch.equal(fetch(), torch.ones(4))
