"""What the planner says that a layer with experts exchanges, against the collectives of an emulated rank."""

from collections import Counter

import pytest
import torch

from actmem.formulas.communication import Exchange
from actmem.layers.llama import LlamaStage
from actmem.measure.comms import count_collectives
from actmem.measure.emulate import emulated_rank
from actmem.measure.parts import run_part
from actmem.parallel.groups import tensor_parallel
from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedLlama
from tests.shapes import decoder

TOKENS = 16
#: All payloads differ.
EXPERTS = decoder(64, 256, 4, 8, 4, 512, TOKENS, num_experts=8, experts_per_token=4)


@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exchanges_are_those_that_are_counted(recompute, sequence_parallel):
    layout = Layout(1, 4, sequence_parallel=sequence_parallel)
    model = PlannedLlama("experts", EXPERTS)
    with emulated_rank(4):
        tp = tensor_parallel(sequence_parallel=sequence_parallel)
        part = LlamaStage(EXPERTS, 4, EXPERTS.vocab_size, range(1, 2), tp, recompute, dtype=torch.bfloat16)
        with count_collectives() as seen:
            y = run_part(part)
            y.backward(torch.empty_like(y))
    counted = Counter((each.kind, each.payload_bytes) for each in seen.collectives)
    predicted: Counter = Counter()
    for each in model.layer_exchanges(layout, recompute):
        predicted[each.kind, each.payload_bytes] += each.count
    assert counted == predicted
    assert {kind for kind, _ in counted} >= ({"all-to-all"} if sequence_parallel else {"all-reduce"})


def test_a_rank_keeps_its_own_part_of_an_all_to_all():
    assert Exchange("all-to-all", "forward", "rows", 4, 400, 2).wire_bytes == 2 * 300
