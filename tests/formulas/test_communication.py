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


@given(layer_cuts(), st.sampled_from(RECOMPUTE_MODES), st.booleans())
def test_the_same_bytes_until_inputs_are_gathered_again(cut, recompute, keep):
    shape, parallel = cut
    t = parallel.tensor_parallel_size
    if t == 1:
        assert layer_collectives(shape, parallel, recompute, 2, keep) == []
        return
    _, b, h, s = shape.letters()
    unit = Fraction(t - 1, t) * 2 * s * b * h
    again_tensor, again_sequence = {"full": (2, 3), "paper-full": (4, 4)}.get(recompute, (0, 0))
    tensor, sequence = 8 + again_tensor, (8 if keep else 10) + again_sequence
    assert wire_bytes(layer_collectives(shape, Parallel(t), recompute)) == tensor * unit
    assert wire_bytes(layer_collectives(shape, Parallel(t, True), recompute, 2, keep)) == sequence * unit


@given(model_cuts(), st.booleans())
def test_what_is_sent_between_stages(cut, sequence_parallel):
    shape, parallel, n = cut
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    sent = [pipeline_sends(shape, parallel, n, rank) for rank in range(p)]
    boundaries = p * m - 1
    for phase in ("forward", "backward"):
        assert sum(x.count for rows in sent for x in rows if x.phase == phase) == boundaries * n
    _, b, h, s = shape.letters()
    size = 2 * s * b * h // parallel.sequence_parts
    assert {x.payload_bytes for rows in sent for x in rows} <= {size}
