"""Parity finds gradients that are no numbers.  Chapters 3 and 4 run it on two processes."""

import math

import measure_parity

from actmem.config import ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem_course.ranks import Ranks


def test_a_gradient_that_is_no_number_is_found(monkeypatch):
    broken = lambda layer, tp: layer.mlp.down.bias.grad.fill_(math.nan)  # noqa: E731
    monkeypatch.setattr(measure_parity, "reduce_partial_gradients", broken)
    with emulated_rank(1, real_tensors=True):
        row = measure_parity.measure(ModelShape(8, 2, 24, 4), "tensor", Ranks(0, 1, "cpu", True))
    assert (row["exact"], row["largest_error"]) == (False, math.inf)
