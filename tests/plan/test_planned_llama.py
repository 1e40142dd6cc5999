"""Today's decoders: parameters as published, collectives as an emulated rank makes them, modes in order."""

from collections import Counter

import pytest
import torch

from actmem.config import Parallel
from actmem.formulas.communication import PredictedCollective
from actmem.ledger.comms import count_collectives
from actmem.ledger.emulate import emulated_rank
from actmem.rows import total
from actmem_more.context import layer_groups
from actmem_more.experts import expert_ranks
from actmem_more.llama import LlamaStage
from actmem_more.llama_shape import LatentHeads
from actmem_more.llama_terms import llama_collectives
from actmem_tools.measured_parts import run_part
from actmem_tools.plan.planned_models import PLANNED_MODELS, planned_model_of
from tests.shapes import decoder


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_the_published_count(name, count):
    assert planned_model_of(name).num_parameters == count


@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_modes_go_from_the_least_recomputed_to_the_most(name):
    model = planned_model_of(name)
    layout = Parallel(8, True)
    sizes = [total(model.rows(layout, mode)) for mode in model.recompute_modes]
    work = [model.added_work(layout, mode) for mode in model.recompute_modes]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert [each.matmul_flops for each in work] == sorted(each.matmul_flops for each in work)
    assert [each.moved_bytes for each in work] == sorted(each.moved_bytes for each in work)


@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_shards_of_a_layer_add_up(name):
    model = planned_model_of(name)
    # With more ranks than key heads each makes K and V of one head, which others make too.
    t = min(8, getattr(model.shape, "num_key_value_heads", 8))
    whole, part = (model.layer_work(Parallel(each, True)) for each in (1, t))
    assert whole.matmul_flops == t * part.matmul_flops
    assert abs(3 * model.num_layers * whole.matmul_flops - model.model_flops(1)) < 0.15 * model.model_flops(1)


TOKENS, LATENT = 16, LatentHeads(40, 24, 8, 4, 12)
EXPERTS = {"num_experts": 8, "experts_per_token": 4}
#: All payloads differ.
SHAPES = {
    "experts": decoder(64, 256, 4, 8, 4, 512, TOKENS, **EXPERTS),
    "latent": decoder(64, 256, 4, 8, 8, 512, TOKENS, latent=LATENT),
    "latent experts": decoder(64, 256, 4, 8, 8, 512, TOKENS, latent=LATENT, num_shared_experts=1, **EXPERTS),
}


@pytest.mark.by_day(12)
@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
@pytest.mark.parametrize(
    ("t", "sequence_parallel", "ranks"), [(4, False, 4), (4, True, 4), (2, True, 4), (1, False, 4)]
)
@pytest.mark.parametrize("kind", SHAPES)
def test_collectives_are_those_that_are_counted(kind, t, sequence_parallel, ranks, recompute):
    shape = SHAPES[kind]
    with emulated_rank(ranks):
        tp, _ = layer_groups(1, sequence_parallel=sequence_parallel, replicas=ranks // t)
        experts = expert_ranks(ranks) if ranks > t else None
        options = {"layers": range(1, 2), "recompute": recompute, "routing": "even", "dtype": torch.bfloat16}
        part = LlamaStage(shape.with_sizes(num_layers=4), tp, experts=experts, **options)
        with count_collectives() as seen:
            y = run_part(part)
            y.backward(torch.empty_like(y))
    counted = Counter((each.kind, each.payload_bytes) for each in seen.collectives)
    predicted: Counter = Counter()
    for each in llama_collectives(shape, Parallel(t, sequence_parallel, expert_parallel_size=ranks), recompute):
        predicted[each.kind, each.payload_bytes] += each.count
    assert counted == predicted
    exchanged = sequence_parallel or t == 1
    assert ("all-to-all" in {kind for kind, _ in counted}) == ("experts" in kind and exchanged)


def test_a_rank_keeps_its_own_part_of_an_all_to_all():
    assert PredictedCollective("all-to-all", "forward", 4, 400, 2).wire_bytes == 2 * 300
