"""Peak bytes: of cases small enough to count by hand, and of the layer against what it holds."""

import torch
from torch import nn

from actmem_course.lab_tools.held_bytes import Runner, held_by, live_peak
from tests.measure.corner_cases import Run


def test_counted_by_hand():
    leaf = torch.zeros(1000, requires_grad=True)
    # When backward ends: both results of exp, the gradient between them, and the input's.
    assert live_peak(Runner(Run(lambda m, x: x.exp().exp()), leaf)) == 4 * 4000


def test_gradients_of_parameters_count_and_are_let_go():
    module, leaf = nn.Linear(64, 64, bias=False), torch.zeros(1, 64, requires_grad=True)
    held = held_by(Runner(module, leaf))
    assert held["peak_bytes"] >= 64 * 64 * 4 and module.weight.grad is None and leaf.grad is None
