"""Context parallelism: the plain layer's numbers, the formula's bytes and collectives, on any number of ranks."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import Parallel
from actmem.ledger.comms import Collective, count_collectives
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.measure_layer import layer_input
from actmem.parallel.groups import TensorParallel
from actmem_more.context import ContextParallel, attend_part, layer_groups
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import (
    CONTEXT_KINDS,
    LLAMA_MODELS,
    LlamaShape,
    llama_layer_terms,
    llama_shape,
    own_context_shape,
)
from actmem_more.llama_terms import context_collectives
from tests.layers.test_llama import FLASH, MODES, all_modes, differences, flash_flops
from tests.tiers import covering, examples

SHAPE = LlamaShape(16, 3, 32, 8, 4, 40)
EXPERTS = LlamaShape(16, 3, 32, 8, 4, 40, 6, True, num_experts=4, experts_per_token=2)
SHAPES = {"llama": SHAPE, "qwen3 with experts": EXPERTS}
ways = pytest.mark.parametrize("way", CONTEXT_KINDS)


def on_ranks(shape, context_parallel_size, way, sequence_parallel):
    return all_modes(shape, *layer_groups(context_parallel_size, way, sequence_parallel=sequence_parallel))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("ranks", "context_parallel_size", "sequence_parallel", "way", "kind"),
    [*covering([2], [2], [False], CONTEXT_KINDS, SHAPES), *covering([4], [2, 4], [False, True], CONTEXT_KINDS, SHAPES)],
)
def test_on_ranks(pools, ranks, context_parallel_size, sequence_parallel, way, kind):
    for error, wrong in pools[ranks].run(on_ranks, SHAPES[kind], context_parallel_size, way, sequence_parallel):
        assert error < 1e-12 and wrong == ""


def steps_collectives(shape, tp, context, recompute):
    """What one rank takes part in, forward and backward."""
    layer = LlamaLayer(shape, tp, recompute=recompute, context=context, routing="even")
    x = layer_input(shape.with_sizes(seq_length=layer.seq_length), tp, "cpu", torch.float32)
    with count_collectives() as seen:
        layer(x).sum().backward()
    return Counter(seen.collectives)


def collective_differences(shape, tp, context, recompute):
    """Between the formula and what was counted, without the collectives among tensor-parallel ranks."""
    parallel = Parallel(tp.size, tp.sequence_parallel, context_parallel_size=context.size)
    own = own_context_shape(shape, parallel, context.kind)
    terms = llama_layer_terms(shape).recipes
    alone = recompute if isinstance(recompute, str) else recompute & {recipe.term for recipe in terms}
    counted = steps_collectives(shape, tp, context, recompute)
    counted.subtract(steps_collectives(own, tp, ContextParallel(), alone))
    collectives = context_collectives(shape, parallel, context.kind, recompute, 4)
    for collective in collectives:
        counted[Collective(collective.kind, collective.payload_bytes)] -= collective.count
    return {collective: count for collective, count in counted.items() if count}


@pytest.mark.by_day(1)
@pytest.mark.slow
@ways
@examples(5, at_night=15)
@given(st.data())
def test_bytes_and_collectives_of_any_shape_and_set(way, data):
    c, t, groups = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    k = data.draw(st.integers(1, 3)) * (t * c if way == "ulysses" else t)
    s, half = 2 * c * t * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    shape = LlamaShape(s, data.draw(st.integers(1, 3)), 24, k * groups, k, 20, 2 * half, data.draw(st.booleans()))
    terms = llama_layer_terms(shape, way == "ulysses").recipes
    recompute = data.draw(st.sampled_from(MODES) | st.sets(st.sampled_from([recipe.term for recipe in terms])))
    sequence_parallel = data.draw(st.booleans())
    with emulated_rank(t * c, data.draw(st.integers(0, t * c - 1))):
        tp, context = layer_groups(c, way, sequence_parallel=sequence_parallel)
        assert differences(shape, recompute, tp, torch.float32, context=context) == ""
        assert collective_differences(shape, tp, context, recompute) == {}


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "way"), covering([name for name, shape in LLAMA_MODELS.items() if not shape.latent], CONTEXT_KINDS, of=1)
)
def test_named_shapes_are_exact_on_emulated_ranks(model, way):
    shape = llama_shape(model)
    t, c = (2, 2) if way == "ulysses" else (8, 4)
    routings = ("even", "one-sided") if shape.num_experts else ("even",)
    with emulated_rank(t * c, t + 1):
        for sequence_parallel in (False, True):
            tp, context = layer_groups(c, way, sequence_parallel=sequence_parallel)
            for mode, routing in ((mode, routing) for mode in MODES for routing in routings):
                assert differences(shape, mode, tp, torch.bfloat16, routing, context) == "", (mode, routing)


def work_of_rank(rank, c, s=48, b=2, a=4, k=2, d=8):
    context = ContextParallel(TensorParallel(None, c, rank))
    q, key = torch.randn(b, a, s // c, d), torch.randn(b, k, s, d)
    flops = flash_flops(LlamaShape(s, b, a * d, a, k, 4 * a * d))
    with FlopCounterMode(display=False, custom_mapping={FLASH: flops}) as counter:
        attend_part(q, key, key, ContextParallel(context.ranks, "gather-plain"))
    return counter.get_total_flops()


@pytest.mark.parametrize("c", [2, 3, 4])
def test_every_rank_has_the_same_work(c):
    """2c chunks: chunk j sees j + 1 of them, and rank i's two see 2c + 1 together."""
    chunk_pairs = (48 // (2 * c)) ** 2
    assert {work_of_rank(rank, c) for rank in range(c)} == {(2 * c + 1) * 2 * 2 * 2 * 4 * 8 * chunk_pairs}
