"""Factories that the command's tests name: right ones and wrong ones."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from tests.measure.corner_cases import Run

NOT_A_FUNCTION = 3


def tiny():
    print("made by a factory that talks")
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (torch.ones(4, 8),)


def by_keyword():
    return nn.Linear(8, 8), {"input": torch.ones(4, 8)}


def layer(seq_length=16, batch_size=2, hidden_size=32, recompute="none"):
    shape = ModelShape(seq_length, batch_size, hidden_size, 4)
    x = torch.randn(seq_length, batch_size, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    return TransformerLayer(shape, recompute=recompute, dtype=torch.bfloat16), (x,)


def selective():
    return layer(recompute="selective")


def gpt():
    shape = ModelShape(16, 2, 32, 4, num_layers=4, vocab_size=64)
    return GPT(shape), (torch.zeros(2, 16, dtype=torch.int64),)


def deep_lookup(seq_length=1 << 20, batch_size=64):
    """Takes another path on fake tensors, as a model does that looks at its inputs' values."""

    def run(m, x):
        y = m.linear(x).exp()
        return y.exp() if type(x).__name__ == "FakeTensor" else y

    return Run(run, linear=nn.Linear(8, 8)), (torch.ones(batch_size, seq_length, 8),)


def other_when_fake():
    return deep_lookup(4, 1)


def raises():
    raise ValueError("two\nlines")


def exits():
    raise SystemExit("usage: train.py")


def only_a_model():
    return nn.Linear(2, 2)


def no_inputs():
    return nn.Linear(2, 2), ()


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no backward here")


def without_backward():
    return Run(lambda m, x: NoBackward.apply(m.linear(x)), linear=nn.Linear(8, 8)), (torch.ones(4, 8),)


def in_eval_mode():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval(), (torch.ones(4, 8),)


def half_trained():
    """A reentrant checkpoint whose input needs no gradient, before a head that is trained; and a convolution."""
    parts = {"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in "12"), "head": nn.Conv1d(4, 4, 1)}

    def run(m, x):
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return m.head(x)

    return Run(run, **parts), (torch.ones(4, 8),)


def compiled():
    return torch.compile(nn.Linear(8, 8)), (torch.ones(4, 8),)


def squared(output):
    return output.square().sum()


def everyday(dtype=torch.bfloat16):
    """What models do while they are made: rates of dropped paths, a truncated normal, a slope, tied weights, another dtype."""
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rates[1]), nn.Linear(8, 8))
    first: Any = model[0]
    nn.init.trunc_normal_(first.weight, std=0.02)
    first.bias.data.copy_(torch.linspace(3, 6, 8))
    model[2].weight = first.weight
    model.to(dtype)
    assert rates == [0, 0.25, 0.5] and model[2].weight is first.weight
    return model, (torch.ones(4, 8, dtype=dtype),)


def deep(seq_length=1 << 20, batch_size=64, num_layers=100):
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers))), (torch.ones(batch_size, seq_length, 8),)


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)), nn.Linear(64, 32))
    for part in (*list(model)[:3], model):
        fully_shard(part, mesh=mesh)
    return model, (torch.randn(8, 64),)


def padded():
    from tests.models_of_others import MODELS

    model, inputs = MODELS["llama"](s=8, b=2, h=32, a=4, k=2, f=48, v=64)
    return model, inputs | {"attention_mask": torch.arange(8) < torch.tensor([[8], [5]])}


def for_long_sequences(s=1 << 20):
    def run(m, x):
        if len(x) < 64:
            raise ValueError("a window of 64 tokens is needed")
        return m.linear(x).sin()

    return Run(run, linear=nn.Linear(64, 64)), (torch.ones(s, 64),)
