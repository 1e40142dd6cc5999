"""Each known waste, planted in a small model, is found; the form without it is not called one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actmem.measure.diagnosis import findings
from actmem.measure.ledger import record
from tests.measure.corner_cases import Run, x

S, A, D = 8, 4, 6


def wastes(module, *inputs):
    with record(module) as ledger:
        output = module(*inputs)
    del output
    return {finding.waste: finding for finding in findings(ledger.tensors)}


def gelu_by_hand(m, x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3))))


class UpcastNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()


def heads(count=A, dtype=torch.float32):
    return x(1, count, S, D, dtype=dtype)


def attention(m, q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def swiglu(m, x):
    return F.silu(x + 1) * (x - 1)


class CopiedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.ones(3, 8, 8))

    def forward(self, x, choice):
        return torch.bmm(x.unsqueeze(1), self.experts[choice])


def two_logits(m, x, targets):
    return F.cross_entropy((x + 1).log_softmax(-1).float(), targets)


IDS = torch.arange(4) % 3
PLANTED = {
    "GeLU in several operations": (Run(gelu_by_hand), (x(),)),
    "norms in float32": (Run(lambda m, x: m.norm(x), norm=UpcastNorm()), (x(dtype=torch.bfloat16),)),
    "attention that keeps s²": (Run(lambda m, q: attention(m, q, q, q, dropout_p=0.1)), (heads(),)),
    "repeated K and V": (Run(lambda m, q, k: attention(m, q, k[:, :, None].expand(1, 2, 2, S, D).reshape(1, A, S, D), q)), (heads(), heads(2))),
    "SiLU kept twice": (Run(swiglu), (x(),)),
    "expert weights copied per token": (CopiedExperts(), (x(), IDS)),
    "masks of s²": (Run(lambda m, x: x.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), 0.0)), (x(8, 8),)),
    "float32 logits kept twice": (Run(two_logits), (x(), IDS)),
    "casts of weights": (nn.Linear(8, 8), (x(),)),
}  # fmt: skip
CLEAN = {
    "F.gelu": (nn.GELU(), (x(),)),
    "layer norm": (nn.LayerNorm(8, dtype=torch.bfloat16), (x(dtype=torch.bfloat16),)),
    "flash attention": (Run(lambda m, q: attention(m, q, q, q)), (heads(),)),
    "a square weight": (nn.Linear(8, 8), (x(4, 8),)),
}


@pytest.mark.parametrize("waste", PLANTED)
def test_a_planted_waste_is_found(waste):
    module, inputs = PLANTED[waste]
    with torch.autocast("cpu", torch.bfloat16, enabled=waste == "casts of weights"):
        found = wastes(module, *inputs)
    assert waste in found, list(found)
    assert found[waste].bytes > 0 and found[waste].floor >= 0 and found[waste].text.endswith(".")


@pytest.mark.parametrize("name", CLEAN)
def test_what_wastes_nothing_is_not_called_a_waste(name):
    module, inputs = CLEAN[name]
    assert wastes(module, *inputs) == {}


def test_repeated_heads_cost_what_they_repeat():
    module, inputs = PLANTED["repeated K and V"]
    finding = wastes(module, *inputs)["repeated K and V"]
    assert (finding.bytes, finding.floor) == (2 * S * D * 4, 2 * S * D * 4)


def test_gathered_inputs_are_found(pools):
    assert all(pools[2].run(gathered_waste))


def gathered_waste():
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    def gather(m, x):
        return m.linear(all_gather_tensor_autograd(x, 0, torch.distributed.group.WORLD))

    return "gathered inputs" in wastes(Run(gather, linear=nn.Linear(8, 8)), x())
