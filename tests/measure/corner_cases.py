"""Small models that are easy to count wrongly or to crash on: each with its inputs, and its bytes by hand where they are clear.

A case is a function that returns ``(module, inputs)`` afresh; inputs as for ``census``.  The number
given to ``case`` is what must be counted, written as a sum of bytes; without one the census decides.
"""

import functools
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from actmem.ledger.recorder import record

CASES = {}
#: Bytes of the state of torch's CPU generator.
STATE = torch.get_rng_state().numel()


def case(expected=None):
    def add(make):
        CASES[make.__name__] = (make, expected)
        return make

    return add


class Run(nn.Module):
    """A function as a module, with submodules as keywords."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def x(*shape, dtype=torch.float32, seed=0):
    shape = shape or (4, 8)
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_() if made.is_floating_point() else made


def run(expected, function, *inputs, name, **modules):
    """A case in one line: a function of the module and the inputs."""

    def make():
        return Run(function, **{k: m() for k, m in modules.items()}), tuple(i() for i in inputs)

    make.__name__ = name
    case(expected)(make)


def ledger_of(module, *args, **kwargs):
    """What one forward pass keeps."""
    with record(module) as ledger:
        output = module(*args, **kwargs)
    del output  # it has to live until the block ends
    return ledger


B = 4 * 8 * 4  # bytes of x()

# What operations keep.
run(B, lambda m, x: x.exp(), x, name="result_of_exp")
run(B, lambda m, x: x * x, x, name="one_tensor_twice")
run(B, lambda m, x: torch.relu_(x * 2), x, name="in_place")
run(B, lambda m, x: (x + 1)[:1].sin(), x, name="slice_keeps_all")
run(B, lambda m, x: sum(p.sin().sum() for p in (x + 1).unbind(0)), x, name="views_of_one_storage")
run(32, lambda m, x: x[:1].exp().expand(100, 8).sum(), x, name="expanded")
run(B // 2, lambda m, x: x.to(torch.bfloat16).sin(), x, name="cast_of_an_activation")
run(0, lambda m, x: x.exp().detach() + x, x, name="detached")
run(0, lambda m, x: [x.exp().sum().item(), x + 1][1], x, name="freed_during_forward")
run(0, lambda m, x: torch.zeros(0, 8).sin() + x.sum(), x, name="empty_tensors")


# Arguments and results in every structure.
@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


class Anything:
    def __init__(self, **fields):
        self.__dict__.update(fields)


@dataclass(slots=True)
class Slotted:
    logits: torch.Tensor


run(B, lambda m, x: Slotted(x.exp()), x, name="returns_slots")
run(B, lambda m, x: deque([x.exp()]), x, name="returns_a_deque")
run(B, lambda m, x: {"a": x.exp(), "b": [x + 1]}, x, name="returns_a_dict")
run(B, lambda m, x: Output(x.exp(), (x + 1,)), x, name="returns_a_dataclass")
run(B, lambda m, x: Anything(loss=x.exp(), cache=Anything(keys=[x + 1])), x, name="returns_an_object")
run(0, lambda m, x: x, x, name="returns_its_input")
run(0, lambda m, x: x[:2], x, name="returns_a_view")
run(B, lambda m, xs: xs[0].sin() + xs[1], lambda: [x(), x(seed=1)], name="takes_a_list")
run(B, lambda m, d: d["x"].sin() + d["y"]["z"], lambda: {"x": x(), "y": {"z": x()}}, name="takes_a_nested_dict")
run(32, lambda m, i: m.e(i), lambda: torch.arange(4), e=lambda: nn.Embedding(9, 3), name="takes_integers")


@case(B)
def takes_keywords():
    return Run(lambda m, *, a, b=None: a.sin() + b), {"a": x(), "b": x(seed=1)}


# torch's modules.
for name, make, inputs in [
    ("batch_norm", lambda: nn.BatchNorm1d(8), x),
    ("dropout", lambda: nn.Dropout(0.5), x),
    ("lstm", lambda: nn.LSTM(8, 5, 2, dropout=0.1), x),
    ("encoder_layer", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: x(2, 4, 8)),
    ("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), x),
    ("script", lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), x),
]:
    run(None, lambda m, x: m.inner(x), inputs, inner=make, name=name)


def _fused(m, x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


run(None, _fused, lambda: x(1, 2, 4, 8), name="fused_attention")


# What hooks can't see.
class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        if where == "attribute":
            ctx.hidden = x.clone()
        elif where == "container":
            ctx.hidden = {"deep": (x.clone(),)}
        elif where == "input":
            ctx.hidden = x
        else:
            ctx.hidden = Anything(cache={"deep": (x.clone(),)})
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad, None


run(B, lambda m, x: Hidden.apply(x, "attribute"), x, name="ctx_attribute")
run(B, lambda m, x: Hidden.apply(x, "container"), x, name="ctx_container")
run(B, lambda m, x: Hidden.apply(x, "object"), x, name="ctx_object")
run(B, lambda m, x: Hidden.apply(x + 0, "input"), x, name="ctx_attribute_of_an_activation")
run(B, lambda m, x: Hidden.apply(x, "input"), x, name="ctx_attribute_of_the_input")


def _hooked(m, x):
    y, mask = x + 1, torch.rand_like(x) > 0.5
    y.register_hook(lambda grad: grad * mask)
    return y


def _node_hook(m, x):
    y, mask = x + 1, torch.rand_like(x)
    y.grad_fn.register_prehook(functools.partial(lambda kept, grads: (grads[0] * kept,), mask))
    return y


run(4 * 8, _hooked, x, name="closure_of_a_hook")
run(B, _node_hook, x, name="partial_in_a_node_hook")


def _attribute(m, x):
    m.cache = (x + 1).detach()
    return x * 2


run(B, _attribute, x, name="attribute_of_the_module")


def _packed(pack, unpack):
    def forward(m, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return (x + 1).sin()

    return forward


run(B // 2, _packed(lambda t: t.to(torch.bfloat16), lambda t: t.float()), x, name="packed_smaller")
run(B, _packed(lambda t: {"t": [t.clone()]}, lambda d: d["t"][0]), x, name="packed_in_a_dict")


def _on_cpu(m, x):
    with torch.autograd.graph.save_on_cpu():
        return (x + 1).sin()


run(B, _on_cpu, x, name="saved_on_cpu")

_INNER = {"inner": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))}
run(B + STATE, lambda m, x: checkpoint(m.inner, x, use_reentrant=False), x, name="checkpoint", **_INNER)
run(B + STATE, lambda m, x: checkpoint(m.inner, x, use_reentrant=True), x, name="reentrant_checkpoint", **_INNER)
_again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _masked(m, x, mask=None):
    mask = x.detach() * 2 if mask is None else mask
    return _again(lambda x, *, mask: m.inner(x) * mask, x, mask=mask)


def _partial(m, x):
    return _again(functools.partial(lambda y, x: m.inner(x) * y, x.detach() * 2), x, use_reentrant=True)


def _selective(policy):
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda m, x: _again(m.inner, x, context_fn=context)


run(B, lambda m, x: _again(m.inner, x), x, name="checkpoint_without_state", **_INNER)
run(2 * B, _masked, x, name="keyword_of_a_checkpoint", **_INNER)
run(2 * B, _masked, x, lambda: x(seed=1).detach(), name="input_as_keyword_of_a_checkpoint", **_INNER)
run(2 * B, _partial, x, name="partial_of_a_reentrant_checkpoint", **_INNER)
run(B, lambda m, x: _again(lambda y: _again(m.inner, y).sin(), x), x, name="checkpoint_in_a_checkpoint", **_INNER)


def _matmuls(ctx, op, *args, **kwargs):
    save = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


# The second product is the output, which the policy caches as well.
run(3 * B, _selective(_matmuls), x, name="selective_policy", **_INNER)
run(2 * B, _selective([torch.ops.aten.tanh.default]), x, name="selective_list", **_INNER)

# Tensors that are no plain tensors.
run(None, lambda m, x: torch.sparse.mm(torch.eye(4).to_sparse(), x).sin(), x, name="sparse")


def _nested(layout):
    def forward(m, a, b):
        t = torch.nested.as_nested_tensor([a, b], layout=layout)
        return torch.nested.to_padded_tensor(torch.sin(t) if layout is torch.jagged else torch.tanh(t), 0.0)

    return forward


_nested(torch.jagged)(None, x(2, 3), x(4, 3))  # makes tensors that live as long as the process
run(None, _nested(torch.jagged), lambda: x(2, 3), lambda: x(4, 3), name="jagged")
run(None, _nested(torch.strided), lambda: x(2, 3), lambda: x(4, 3), name="nested")
run(
    None,
    lambda m, x: torch.vmap(m.inner, randomness="different")(x),
    x,
    name="vmap_of_a_module",
    inner=lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.LayerNorm(8)),
)
run(
    B + 3 * 8 * 4,
    lambda m, x: (
        torch.func.functional_call(m.inner, {"weight": torch.ones(3, 8), "bias": torch.ones(3)}, (x,)) * 0 + m.inner(x)
    ),
    x,
    name="functional_call",
    inner=lambda: nn.Linear(8, 3),
)

# The input, both results and both tangents of tanh; the tangents of weights are zeros that take no memory.
run(5 * B, lambda m, x: torch.func.jvp(m.inner, (x,), (x * 2,)), x, name="tangents", **_INNER)


def _backward_inside(m, x):
    y = m.inner(x)
    y.sum().backward(retain_graph=False)
    return x.sin()


run(None, _backward_inside, x, name="backward_inside", **_INNER)


# Weights, whatever way they are used.
def _tied():
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, second)


run(2 * B, lambda m, x: m.inner(x), x, inner=_tied, name="tied_weights")
run(0, lambda m, x: m.l(x), x, l=lambda: nn.Linear(8, 3).requires_grad_(False), name="frozen")
run(B, lambda m, x: x @ m.l.weight.t().view(8, 3), x, l=lambda: nn.Linear(8, 3), name="view_of_a_weight")
run(B, lambda m, x: x @ m.l.weight.detach().t() + m.l(x), x, l=lambda: nn.Linear(8, 3), name="detached_weight")
run(0, lambda m, x: x * m.b.running_mean + m.b.running_var, x, b=lambda: nn.BatchNorm1d(8), name="buffers")


def _replaced_buffer(m, x):
    m.b.running_mean = m.b.running_mean + x.detach().mean(0)
    return x * m.b.running_mean


run(0, _replaced_buffer, x, b=lambda: nn.BatchNorm1d(8), name="a_buffer_that_forward_replaces")
run(B, lambda m, x: m.l(x), x, l=lambda: nn.LazyLinear(8), name="lazy_weights")


@case(2 * B)
def compiled():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return Run(lambda m, x: torch.compile(m.inner, backend="aot_eager")(x), inner=inner), (x(),)
