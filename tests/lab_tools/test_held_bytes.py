"""Peak bytes: of cases small enough to count by hand, and of the layer against what it holds."""

import pytest
import torch
from torch import nn

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem_course.lab_tools.held_bytes import Runner, held_by, live_peak

SHAPE = ModelShape(32, 2, 48, 4)


class ExpTwice(nn.Module):
    def forward(self, x):
        return x.exp().exp()


def test_counted_by_hand():
    leaf = torch.zeros(1000, requires_grad=True)
    # When backward ends: both results of exp, the gradient between them, and the input's.
    assert live_peak(Runner(ExpTwice(), leaf)) == 4 * 4000


def test_gradients_of_parameters_count_and_are_let_go():
    module, leaf = nn.Linear(64, 64, bias=False), torch.zeros(1, 64, requires_grad=True)
    held = held_by(Runner(module, leaf))
    assert held.peak_bytes >= 64 * 64 * 4 and module.weight.grad is None and leaf.grad is None
    assert held.allocated_bytes is None and held.requested_bytes is None and held.finite


@pytest.mark.by_day(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_peak_is_no_less_than_what_is_held(recompute):
    layer = TransformerLayer(SHAPE, recompute=recompute, dtype=torch.float32)
    leaf = torch.randn(32, 2, 48, requires_grad=True)
    held = held_by(Runner(layer, leaf))
    assert held.peak_bytes >= held.held_bytes + leaf.numel() * 4


def test_an_emptied_storage_has_no_bytes():
    class Emptying(nn.Module):
        def forward(self, x):
            first = x.detach().repeat(100)
            first.untyped_storage().resize_(0)
            second = x.detach().repeat(100)
            del first, second
            return x * 3

    # The copy of the leaf, and one of the two.
    assert live_peak(Runner(Emptying(), torch.zeros(10, requires_grad=True))) == 40 + 4000
