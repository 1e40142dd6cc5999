"""Nanotron's bill: every published run, the closed form, and the parts that it shares with the paper's."""

from itertools import product

import pytest
import torch

from actmem.config import padded_vocab_size
from actmem_course.others.nanotron import (
    NANOTRON_MODEL,
    first_stage_layers,
    layer_bytes,
    loss_bytes,
    nanotron_runs,
)

MODEL, LENGTH = NANOTRON_MODEL, NANOTRON_MODEL.seq_length


@pytest.mark.parametrize(("tp", "mbz"), [*product((1, 2, 4, 8), (1, 2, 8))])
def test_a_layers_rows_are_the_closed_form(tp, mbz):
    h, f, a, s = MODEL.hidden_size, MODEL.ffn_hidden_size, MODEL.num_attention_heads, LENGTH
    inner = (9 if mbz > 1 else 8) * h + 4 * f
    closed = mbz * (2 * s * 2 * h + (2 * s * inner + 4 * s * a + 8 * s) // tp)
    assert sum(layer_bytes(mbz, tp).values()) == closed


@pytest.mark.parametrize("tp", [1, 4])
def test_the_last_stage_keeps_what_its_norm_head_and_loss_make(tp):
    """The tensors of sharded_cross_entropy, made here in its order, and the inputs of the norm and of the head."""
    tokens, vocab_size = 2 * LENGTH, padded_vocab_size(MODEL.vocab_size, tp, multiple=1)
    with torch.device("meta"):
        logits = torch.empty(tokens, vocab_size // tp)
        highest = logits.amax(-1)
        shifted = logits - highest[:, None]
        target = torch.empty(tokens, dtype=torch.int64)
        outside = target < MODEL.vocab_size
        places = target - 1
        flat = places + 0
        picked, sums = shifted[:, 0].clone(), shifted.sum(-1)
    kept = [logits, highest, shifted, target, outside, places, flat, picked, sums]
    hidden = 2 * tokens * MODEL.hidden_size
    inputs = hidden // tp + 4 * tokens // tp + hidden
    assert sum(loss_bytes(2, tp, vocab_size).values()) == inputs + sum(tensor.nbytes for tensor in kept)


@pytest.mark.parametrize(("pp", "first"), [(1, 24), (2, 14), (4, 7), (8, 4), (16, 2)])
def test_the_block_that_crosses_a_ranks_share_stays(pp, first):
    assert first_stage_layers(pp) == first


def test_18_runs_are_predicted_within_a_tenth_of_a_percent():
    runs = nanotron_runs()
    assert len(runs) == 18 and max(abs(run.difference_percent) for run in runs) < 0.1
    assert all(run.gpus == run.dp * run.tp * run.pp for run in runs)
