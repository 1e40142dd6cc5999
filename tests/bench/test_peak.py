"""Peak bytes: of cases small enough to count by hand, and of the layer against what it holds."""

import pytest
import torch
from torch import nn

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.measure.ledger import record
from actmem_course.bench.peak import measure_memory

SHAPE = ModelShape(32, 2, 48, 4)


class ExpTwice(nn.Module):
    def forward(self, x):
        return x.exp().exp()


def test_counted_by_hand():
    leaf = torch.zeros(1000, requires_grad=True)
    # When backward ends: both results of exp, the gradient between them, and the input's.
    assert measure_memory(ExpTwice(), leaf).peak_bytes == 4 * 4000
    assert leaf.grad is None


def test_gradients_of_parameters_count_and_are_let_go():
    module, leaf = nn.Linear(64, 64, bias=False), torch.zeros(1, 64, requires_grad=True)
    memory = measure_memory(module, leaf)
    assert memory.peak_bytes >= 64 * 64 * 4 and module.weight.grad is None
    assert memory.allocated_bytes is None and memory.requested_bytes is None


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_peak_is_no_less_than_what_is_held(recompute):
    layer = TransformerLayer(SHAPE, recompute=recompute, dtype=torch.float32)
    leaf = torch.randn(32, 2, 48, requires_grad=True)
    with record(layer) as ledger:
        y = layer(leaf.clone())
    assert measure_memory(layer, leaf).peak_bytes >= ledger.total_bytes + y.numel() * 4


def test_an_emptied_storage_has_no_bytes():
    class Emptying(nn.Module):
        def forward(self, x):
            first = x.detach().repeat(100)
            first.untyped_storage().resize_(0)
            second = x.detach().repeat(100)
            del first, second
            return x * 3

    # The copy of the leaf, and one of the two.
    assert measure_memory(Emptying(), torch.zeros(10, requires_grad=True)).peak_bytes == 40 + 4000
