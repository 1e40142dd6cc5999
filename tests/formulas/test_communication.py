"""Predicted collectives against those that the real layer and the real model make."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import ModelShape, Parallel
from actmem.formulas.communication import (
    layer_collectives,
    wire_bytes,
)
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.comms import count_collectives
from actmem.ledger.emulate import emulated_rank
from actmem.parallel.groups import tensor_parallel
from actmem.recipes import RECOMPUTE_MODES
from actmem_course.predicted.pipeline_sends import pipeline_sends
from tests.shapes import layer_cuts, model_cuts
from tests.tiers import covering

SHAPE = ModelShape(8, 3, 24, 4, num_layers=2, vocab_size=20)


def expected(collectives):
    """(kind, payload) of each collective, as a multiset."""
    return Counter((x.kind, x.payload_bytes) for x in collectives for _ in range(x.count))


def seen_in(collectives):
    return Counter((c.kind, c.payload_bytes) for c in collectives)


@pytest.mark.by_day(14)
@pytest.mark.parametrize(
    ("t", "sequence_parallel", "recompute", "keep_gathered_input"),
    covering([1, 2, 4], [False, True], RECOMPUTE_MODES, [False, True]),
)
def test_the_real_layer_makes_them(t, sequence_parallel, recompute, keep_gathered_input):
    with emulated_rank(t):
        tp = tensor_parallel(sequence_parallel=sequence_parallel, keep_gathered_input=keep_gathered_input)
        layer = TransformerLayer(SHAPE, tp, recompute=recompute, dtype=torch.bfloat16)
        x = torch.zeros(8 // (t if sequence_parallel else 1), 3, 24, dtype=torch.bfloat16, requires_grad=True)
        with count_collectives() as forward:
            y = layer(x)
        with count_collectives() as backward:
            y.sum().backward()
    collectives = layer_collectives(SHAPE, Parallel(t, sequence_parallel), recompute, 2, keep_gathered_input)
    assert seen_in(forward.collectives) == expected(x for x in collectives if x.phase == "forward")
    assert seen_in(backward.collectives) == expected(x for x in collectives if x.phase != "forward")
