"""The checkpoint function: same bits, random numbers put back, clear errors."""

import re
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.recipes import RECOMPUTE_MODES
from actmem.recompute import around_second_runs, checkpoint
from actmem.rows import LAYER_TERMS
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape, llama_layer_terms

SHAPE, LLAMA = ModelShape(16, 2, 24, 4), LlamaShape(16, 2, 24, 4, 2, 40)


def block(weight, x, generator):
    mask = torch.empty(x.shape).bernoulli_(0.5, generator=generator)
    return torch.tanh(F.linear(x * mask, weight)).exp()


def test_backward_twice_through_a_retained_graph():
    x = torch.randn(3, 4, requires_grad=True)
    y = checkpoint(lambda x: (x.exp() * x).sum(), x)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second) and torch.allclose(first, (x.exp() * (x + 1)).detach())


def test_generators_go_on_wherever_a_hook_puts_their_state():
    def behind_zeros(tensor):
        return torch.cat([torch.zeros_like(tensor), tensor])[len(tensor) :]

    def every_second(tensor):
        return torch.stack([tensor, tensor], -1)[..., 0]

    generator, weight, found = torch.Generator(), torch.randn(8, 8), []
    for pack in (lambda tensor: tensor, behind_zeros, every_second):
        generator.manual_seed(3)
        x = torch.ones(5, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = checkpoint(lambda x: block(weight, x, generator), x, generators=[generator])
        y.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found[:2]) and torch.equal(*found[1:])


class ReadsOneByOne(torch.autograd.Function):
    """Its backward asks for its saved tensors twice, and holds neither while it asks again."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        for_y = ctx.saved_tensors[0] * grad
        for_x = ctx.saved_tensors[1] * grad
        return for_x, for_y


def test_saved_tensors_may_be_read_any_number_of_times():
    runs = []

    def function(x):
        runs.append(1)
        return ReadsOneByOne.apply(x.exp(), x.sin()).cos()

    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert len(runs) == 2
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(x.grad, expected)


class CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_recomputed_tensor_is_freed_with_the_node_that_saved_it(retain_graph):
    made, alive = [], []

    def function(x):
        y = CallInBackward.apply(x.exp(), lambda: alive.append([ref() is not None for ref in made])).exp()
        made.append(weakref.ref(y.untyped_storage()))  # what the second exp saves
        return y * 1

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(function, x, stop_early=False).sum()
    y.backward(retain_graph=retain_graph)
    assert alive == [[False, False]]


def test_no_inputs_inputs_without_gradients_and_nothing_to_differentiate():
    weight = torch.randn(3, requires_grad=True)
    checkpoint(lambda: weight.exp()).sum().backward()
    assert torch.equal(weight.grad, weight.exp().detach())
    x, scale = torch.randn(3), torch.randn(3, requires_grad=True)
    checkpoint(lambda x, scale: x * scale.exp(), x, scale).sum().backward()
    assert torch.allclose(scale.grad, x * scale.exp().detach())
    with torch.no_grad():
        assert not checkpoint(lambda x: x * 2, scale).requires_grad


@pytest.mark.parametrize("recompute", [*RECOMPUTE_MODES, LAYER_TERMS[1:]])
def test_a_layer_under_autocast(recompute):
    def gradients(mode):
        torch.manual_seed(0)
        layer = TransformerLayer(SHAPE, recompute=mode, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.randn(16, 2, 24))
        y.sum().backward()
        return [parameter.grad for parameter in layer.parameters()]

    found = gradients(recompute)
    assert all(grad.dtype == torch.float32 and torch.isfinite(grad).all() for grad in found)
    assert all(torch.equal(*pair) for pair in zip(found, gradients("none")))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x[:1].exp().expand(3), r"the second run of .*fickle saved \(1,\) torch.float32 as tensor 1; the first run saved \(3,\)"),
        (lambda x: x * 1, "saved 0 tensors, the first 1"),
    ],
)  # fmt: skip
def test_a_function_that_changes_its_mind_is_named(second, message):
    runs = []

    def fickle(x):
        runs.append(1)
        return x.exp() if len(runs) == 1 else second(x)

    y = checkpoint(fickle, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def layer_again(kind, recompute):
    if kind == "paper":
        return TransformerLayer(SHAPE, recompute=recompute, p=0.0, seed=5)
    return LlamaLayer(LLAMA, recompute=recompute, seed=5)


ALL_TERMS = {"paper": LAYER_TERMS[1:], "llama": [recipe.term for recipe in llama_layer_terms(LLAMA).recipes]}
WHOLE_LAYERS = [(kind, mode) for kind in ALL_TERMS for mode in ("full", "paper-full", ALL_TERMS[kind])]


@pytest.mark.parametrize(("kind", "mode"), WHOLE_LAYERS)
def test_a_parameter_that_was_written_before_the_second_run_is_named(kind, mode):
    for name, _ in layer_again(kind, mode).named_parameters():
        layer, x = layer_again(kind, mode), torch.randn(16, 2, 24, requires_grad=True)
        y = layer(x)
        with torch.no_grad():
            layer.get_parameter(name).mul_(2)
        with pytest.raises(RuntimeError, match=f"^{re.escape(name)} was written or replaced between"):
            y.sum().backward()
        y = torch.func.functional_call(layer, {name: layer.get_parameter(name).detach() * 2}, (x,))
        with pytest.raises(RuntimeError, match=f"^{re.escape(name)} was written or replaced between"):
            y.sum().backward()


@pytest.mark.parametrize(("kind", "mode"), WHOLE_LAYERS)
def test_a_buffer_that_the_second_run_writes_again_is_named(kind, mode):
    """Spectral norm goes on from its last estimate in each forward pass, so that the second run's weight is another."""
    layer, x = layer_again(kind, mode), torch.randn(16, 2, 24, requires_grad=True)
    spectral_norm(*(layer.mlp.up, "weight") if kind == "paper" else (layer.mlp, "up"))
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"^mlp\.\S+\.0\._u was written or replaced between"):
        y.sum().backward()


@torch.no_grad()
def step(parameter):
    parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize(("kind", "mode"), WHOLE_LAYERS)
def test_an_optimizer_may_step_in_backward(kind, mode):
    found = []
    for recompute in ("none", mode):
        layer, x = layer_again(kind, recompute), torch.ones(16, 2, 24, requires_grad=True)
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        layer(x).square().sum().backward()
        found.append([x.grad, *(parameter.detach() for parameter in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found))


def under_fsdp(kind, recompute, wrap):
    """Gradients of the input, without and with what shares the parameters among the ranks and gathers them again."""
    found = []
    for shared in (False, True):
        layer, x = layer_again(kind, recompute if shared else "none"), torch.ones(16, 2, 24, requires_grad=True)
        if shared and wrap == "FSDP2":
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        elif shared:
            layer = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
        layer(x).square().sum().backward()
        found.append(x.grad)
    return torch.equal(*found)


@pytest.mark.parametrize("wrap", ["FSDP", "FSDP2"])
@pytest.mark.parametrize(("kind", "mode"), [("paper", "full"), ("llama", "full"), ("llama", "paper-full")])
def test_parameters_that_fsdp_gathers_again_are_the_same(kind, mode, wrap, pools):
    assert pools[2].run(under_fsdp, kind, mode, wrap) == [True, True]


def test_a_parameter_that_a_function_reads_is_looked_at_when_it_is_saved_again():
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    holder = {"weight": weight}
    x = torch.randn(3, requires_grad=True)
    y = checkpoint(lambda x: (x * holder["weight"].t()).exp(), x)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3,\) was written or replaced"):
        y.sum().backward()
    y = checkpoint(lambda x: (x * holder["weight"]).exp(), x)
    holder["weight"] = other
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3,\) was written or replaced"):
        y.sum().backward()


class ExpInTraining(nn.Module):
    def forward(self, x):
        return (x.exp() if self.training else x).sin()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_module_s_second_run_is_in_the_mode_of_the_first(wrapped):
    module, x = nn.Sequential(ExpInTraining()), torch.randn(6, requires_grad=True)
    (wanted,) = torch.autograd.grad(module(x).sum(), x)
    y = (checkpoint(lambda x: module(x), x, module=module) if wrapped else checkpoint(module, x)).sum()
    module.eval()
    assert torch.equal(torch.autograd.grad(y, x)[0], wanted) and not module[0].training


def test_a_module_with_several_results_is_checked_before_the_first_of_them():
    linear, x = nn.Linear(3, 3), torch.randn(3, requires_grad=True)
    first, _, second = checkpoint(lambda x: (linear(x).exp(), None, linear(x).sin()), x, module=linear)
    (first.sum() + second.sum()).backward(retain_graph=True)
    with torch.no_grad():
        linear.weight.add_(1)
    for result in (first, second):
        with pytest.raises(RuntimeError, match="^weight was written or replaced between"):
            result.sum().backward(retain_graph=True)


def test_a_write_to_a_saved_tensor_in_the_second_run_is_refused():
    def function(x):
        y = x.exp()
        z = y * 1.0
        y.add_(1)
        return (z * y).sum()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"function: a saved tensor \(3,\) was written in place afterwards$"):
        checkpoint(function, x).backward()


def test_second_runs_can_be_observed_and_regions_nest():
    entered = []

    @contextmanager
    def observe(function):
        entered.append(f"{function.__name__} begins")
        yield
        entered.append(f"{function.__name__} ends")

    def inner(x):
        return x.sin().exp()

    def outer(x):
        return checkpoint(inner, x.cos()).tanh()

    x = torch.randn(6, requires_grad=True)
    with around_second_runs(observe):
        checkpoint(outer, x).sum().backward()
    checkpoint(outer, x).sum().backward()
    assert entered == ["outer begins", "outer ends", "inner begins", "inner ends"]
    (expected,) = torch.autograd.grad(2 * x.cos().sin().exp().tanh().sum(), x)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_backward_lets_go_of_the_input_while_the_output_lives(recompute):
    layer = TransformerLayer(SHAPE, recompute=recompute)
    x = torch.randn(16, 2, 24, requires_grad=True).clone()
    held = StorageWeakRef(x.untyped_storage())
    y = layer(x)
    del x
    assert not held.expired()
    y.backward(y.detach())
    assert held.expired()
