"""The peak of a stage's backward pass, as tapes have it and as counted on an emulated rank: equal to the byte."""

import pytest
import torch

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.layers.llama import LlamaStage
from actmem.measure.emulate import emulated_rank
from actmem.measure.parts import measure_part_peak
from actmem.parallel.groups import tensor_parallel
from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedGPT, PlannedLlama
from actmem.rows import total
from actmem.tape.stage_tapes import transient_rows
from tests.shapes import decoder
from tests.tiers import covering

#: All sizes differ.  The second one's vocabulary is so large that the embedding's gradient is the fullest moment.
SHAPES = {
    "small": ModelShape(48, 3, 80, 4, num_layers=4, vocab_size=512),
    "many words": ModelShape(16, 2, 64, 4, num_layers=4, vocab_size=8192),
    "one head a rank": ModelShape(64, 1, 96, 4, num_layers=4, vocab_size=256),
}
STAGES = {"middle": range(1, 3), "first": range(0, 1), "last": range(3, 4), "whole model": range(0, 4)}
RANKS = {"one device": (1, False), "tensor": (2, False), "tensor and sequence": (4, True)}


def made(model, layout, recompute, first, last, layers):
    layer, ends = model.parts(layout, recompute, first, last, "cpu")
    return transient_rows(layer, ends, first, last, layers)


def predicted(shape, t, sequence_parallel, layers, recompute):
    layout = Layout(1, t, micro_batch_size=shape.micro_batch_size, sequence_parallel=sequence_parallel)
    first, last = layers.start == 0, layers.stop == shape.num_layers
    return made(PlannedGPT("small", shape), layout, recompute, first, last, len(layers))


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "recompute"),
    covering(SHAPES, STAGES, RANKS, ["none", "selective", "elementwise", "full"]),
)
def test_the_transient_is_what_is_counted(name, stage, ranks, recompute):
    shape, layers, (t, sequence_parallel) = SHAPES[name], STAGES[stage], RANKS[ranks]
    with emulated_rank(t):
        tp = tensor_parallel(sequence_parallel=sequence_parallel)
        part = GPT(shape, tp, layers=layers, recompute=recompute, dtype=torch.bfloat16)
        kept, peak = measure_part_peak(part)
    assert total(predicted(shape, t, sequence_parallel, layers, recompute)) == peak - kept


DECODERS = {
    "small": decoder(80, 112, 4, 4, 2, 512, 48, 3),
    "many words": decoder(64, 96, 4, 4, 4, 8192, 16, 2),
    "one key head": decoder(128, 352, 4, 8, 1, 264, 64, 1),
    "norms of query and key": decoder(80, 112, 4, 4, 2, 512, 48, 3, head_size=24, qk_norm=True),
    "large heads": decoder(32, 40, 4, 4, 4, 128, 16, 1, head_size=64, qk_norm=True),
}


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "recompute"), covering(DECODERS, STAGES, RANKS, ["none", "elementwise", "full"])
)
def test_the_transient_of_a_llama_is_what_is_counted(name, stage, ranks, recompute):
    shape, layers, (t, sequence_parallel) = DECODERS[name], STAGES[stage], RANKS[ranks]
    layout = Layout(1, t, micro_batch_size=shape.micro_batch_size, sequence_parallel=sequence_parallel)
    with emulated_rank(t):
        tp = tensor_parallel(sequence_parallel=sequence_parallel)
        part = LlamaStage(shape, 4, shape.vocab_size, layers, tp, recompute, dtype=torch.bfloat16)
        kept, peak = measure_part_peak(part)
    ends = layers.start == 0, layers.stop == 4
    rows = made(PlannedLlama("small", shape), layout, recompute, *ends, len(layers))
    assert total(rows) == peak - kept


#: The experts' weights fill the first, the dispatched rows the second.
WITH_EXPERTS = {
    "large experts": decoder(64, 256, 4, 8, 4, 512, 16, 1, num_experts=8, experts_per_token=3),
    "small experts, norms": decoder(128, 24, 4, 8, 4, 512, 64, 2, head_size=24, qk_norm=True, num_experts=16, experts_per_token=4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "routing", "ranks", "recompute"),
    covering(WITH_EXPERTS, ["even", "one-sided"], RANKS, ["none", "elementwise", "full"]),
)
def test_the_transient_of_experts_is_what_is_counted(name, routing, ranks, recompute):
    shape, (t, sequence_parallel) = WITH_EXPERTS[name], RANKS[ranks]
    layout = Layout(1, t, micro_batch_size=shape.micro_batch_size, sequence_parallel=sequence_parallel)
    model = PlannedLlama("small", shape).with_routing(routing)
    with emulated_rank(t):
        tp = tensor_parallel(sequence_parallel=sequence_parallel)
        part = LlamaStage(shape, 4, shape.vocab_size, range(1, 2), tp, recompute, routing, dtype=torch.bfloat16)
        kept, peak = measure_part_peak(part)
    assert total(model.rows(layout, recompute)) == kept
    assert total(made(model, layout, recompute, False, False, 1)) == peak - kept


def test_the_embedding_can_be_the_fullest():
    rows = predicted(SHAPES["many words"], 1, False, STAGES["first"], "none")
    assert "_LookupBackward: embedding_dense_backward" in {row.term for row in rows}
    rows = predicted(SHAPES["small"], 1, False, STAGES["first"], "none")
    assert "_LookupBackward: embedding_dense_backward" not in {row.term for row in rows}
