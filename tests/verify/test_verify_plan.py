"""Plans of every axis that this library runs, emulated: every line of their bills is what is counted."""

from copy import copy
from dataclasses import replace

import pytest
from rich.console import Console

from actmem.config import PAPER_MODELS, ZERO_STAGES, ConfigError, ModelShape, Parallel
from actmem_tools.plan.planned_models import PLANNED_MODELS, PlannedGPT, PlannedLlama, planned_model_of
from actmem_tools.plan.search import Plan, Request, bill_of
from actmem_tools.plan.step_time import GIBIBYTE, Cluster, StepSeconds
from actmem_tools.tape.stage_tapes import Transient
from actmem_tools.verify import chunks_of, count_peak, report_verification, verify_plan
from tests.shapes import decoder
from tests.tiers import at_night, sampled

#: Small, with all sizes different; 7 layers can't be spread evenly over 2 or 4 ranks.
SMALL = PlannedGPT("small", ModelShape(64, 1, 96, 8, num_layers=8, vocab_size=256))
ODD = PlannedGPT("odd", ModelShape(64, 1, 96, 8, num_layers=7, vocab_size=256))
LLAMA = PlannedLlama("llama", decoder(128, 352, 4, 8, 4, 257))
QWEN3 = PlannedLlama("qwen3", decoder(128, 352, 4, 8, 4, 257, head_size=24, qk_norm=True))
#: The embedding's gradient is their fullest moment.
WORDS = PlannedGPT("many words", ModelShape(16, 1, 64, 4, num_layers=4, vocab_size=8192))
LLAMA_WORDS = PlannedLlama("many words", decoder(64, 96, 4, 4, 4, 8192, 16))
LARGE_HEADS = PlannedLlama("large heads", decoder(32, 40, 4, 4, 4, 128, 16, 1, head_size=64, qk_norm=True))
EXPERTS = PlannedLlama("experts", decoder(64, 256, 4, 8, 4, 512, 16, 1, num_experts=8, experts_per_token=3))
QWEN_MOE = PlannedLlama("qwen3 moe", replace(EXPERTS.shape, head_size=24, qk_norm=True))
TIED = PlannedLlama("tied", decoder(128, 352, 4, 8, 4, 257, tied_embeddings=True))
#: With the ends as layers of their own, 12 in 6 stages.
ENDS = PlannedLlama("ends", decoder(128, 352, 10, 8, 4, 257))
NO_TIME = StepSeconds(0, 0, 0, 0, 0, 0, 0)


def plan(layout, recompute="none", n=16, rank=0):
    return Plan(layout, recompute, n, rank, 0, NO_TIME)


CASES = {
    "one device": (SMALL, plan(Parallel())),
    "tensor": (SMALL, plan(Parallel(4), "selective")),
    "tensor and sequence": (SMALL, plan(Parallel(8, True), "elementwise")),
    "larger microbatches": (SMALL, plan(Parallel(2, True, 1, micro_batch_size=3), "full")),
    "pipeline, first": (SMALL, plan(Parallel(2, True, 4), "none")),
    "pipeline, second": (SMALL, plan(Parallel(2, True, 4), "selective", rank=1)),
    "pipeline, last": (SMALL, plan(Parallel(2, True, 4), "elementwise", rank=3)),
    "few microbatches": (SMALL, plan(Parallel(2, True, 4), "none", n=2)),
    "chunks, first": (SMALL, plan(Parallel(2, True, 2, num_model_chunks=2), "none")),
    "chunks, last": (SMALL, plan(Parallel(2, True, 2, num_model_chunks=4), "full", rank=1)),
    "data parallel": (SMALL, plan(Parallel(2, True, data_parallel_size=4, zero_stage=0), "selective")),
    "ZeRO-1": (SMALL, plan(Parallel(2, True, data_parallel_size=3, zero_stage=1), "none")),
    "ZeRO-2": (SMALL, plan(Parallel(2, True, data_parallel_size=5, zero_stage=2), "none")),
    "ZeRO-3": (SMALL, plan(Parallel(2, True, data_parallel_size=7, zero_stage=3), "none")),
    "uneven, first": (ODD, plan(Parallel(2, True, 4), "selective")),
    "uneven, second": (ODD, plan(Parallel(2, True, 4), "selective", rank=1)),
    "uneven, last": (ODD, plan(Parallel(2, True, 4), "none", rank=3)),
    "llama, one device": (LLAMA, plan(Parallel())),
    "llama, tensor": (LLAMA, plan(Parallel(2), "elementwise")),
    "llama, more ranks than key heads": (LLAMA, plan(Parallel(8, True), "none")),
    "llama, pipeline": (LLAMA, plan(Parallel(2, True, 2, micro_batch_size=3), "full")),
    "llama, last": (LLAMA, plan(Parallel(2, True, 2, data_parallel_size=2), "elementwise", rank=1)),
    "llama, chunks": (LLAMA, plan(Parallel(4, True, 2, num_model_chunks=2), "none", rank=1)),
    "chunks, first of short ends": (ENDS, plan(Parallel(2, True, 3, num_model_chunks=2), "none", n=6)),
    "chunks, last of short ends": (ENDS, plan(Parallel(2, True, 3, num_model_chunks=2), "none", n=6, rank=2)),
    "chunks, short ends, one round": (ENDS, plan(Parallel(2, True, 3, num_model_chunks=2), "full", n=3, rank=2)),
    "llama, tied, first": (TIED, plan(Parallel(2, True, 2, data_parallel_size=2), "elementwise")),
    "llama, tied, last": (TIED, plan(Parallel(1, False, 4), "none", rank=3)),
    "qwen3, more ranks than key heads": (QWEN3, plan(Parallel(8, True), "elementwise")),
    "qwen3, last": (QWEN3, plan(Parallel(2, True, 2, data_parallel_size=2), "none", rank=1)),
    "qwen3, tensor": (QWEN3, plan(Parallel(4), "full")),
    "llama, ZeRO-3": (LLAMA, plan(Parallel(2, True, data_parallel_size=3, zero_stage=3), "none")),
    "many words, first": (WORDS, plan(Parallel(1, False, 2, micro_batch_size=2), "none")),
    "many words, last": (WORDS, plan(Parallel(2, False, 2, micro_batch_size=2), "full", rank=1)),
    "llama, many words": (LLAMA_WORDS, plan(Parallel(4, True, 2, micro_batch_size=2), "none")),
    "large heads": (LARGE_HEADS, plan(Parallel(2, True, 2), "elementwise", rank=1)),
    "large experts": (EXPERTS.with_routing("one-sided"), plan(Parallel(4), "full")),
    "experts": (EXPERTS, plan(Parallel(2, True, 2), "none", rank=1)),
    "experts beside": (EXPERTS, plan(Parallel(data_parallel_size=8, zero_stage=1, expert_parallel_size=4), "none")),
    "experts beside, tensor": (
        QWEN_MOE.with_routing("one-sided"),
        plan(Parallel(2, True, 2, data_parallel_size=4, zero_stage=3, expert_parallel_size=4), "elementwise"),
    ),
    "experts beside, context": (
        QWEN_MOE,
        plan(Parallel(context_parallel_size=2, data_parallel_size=2, zero_stage=2, expert_parallel_size=4), "full"),
    ),
    "context": (LLAMA, plan(Parallel(data_parallel_size=2, context_parallel_size=4, zero_stage=2))),
    "context, tensor": (LLAMA, plan(Parallel(8, True, context_parallel_size=2), "elementwise")),
    "context, pipeline": (
        LLAMA,
        plan(Parallel(2, True, 2, micro_batch_size=3, context_parallel_size=2), "full", rank=1),
    ),
    "context, norms over heads": (QWEN3, plan(Parallel(2, True, 2, context_parallel_size=2), "none")),
}


def every_line_and_the_peak_are_what_is_counted(model, one):
    comparison, peak = verify_plan(model, one), count_peak(model, one)
    assert comparison.exact, comparison.describe()
    assert peak.measured > 0 and not peak.difference, peak
    return comparison


@pytest.mark.by_day(1)
@pytest.mark.parametrize("case", sampled(CASES, 16))
def test_plans_of_every_axis(case):
    comparison = every_line_and_the_peak_are_what_is_counted(*CASES[case])
    assert {"parameters", "gradients", "Adam first moment"} <= {match.term for match in comparison.matches}


@pytest.mark.parametrize("name", ["22B", at_night("1T")])
def test_a_plan_of_a_large_model_as_the_search_finds_it(name):
    model, paper = planned_model_of(name), PAPER_MODELS[name]
    cluster = Cluster(paper.parallel.num_devices, 80 * GIBIBYTE)
    found = Request(model, cluster, paper.global_batch_size, {"num_model_chunks": 1}, everything=True).search(30)
    chosen = max(found.plans, key=lambda each: each.layout.pipeline_parallel_size)
    comparison = verify_plan(model, chosen)
    assert comparison.exact, comparison.describe()


def test_a_wrong_line_is_found(monkeypatch):
    model, one = CASES["tensor"]
    model = copy(model)  # what bills share is remembered for a model
    rows = model.rows
    others = lambda layout, what, *device: [] if what == "last" else rows(layout, what, *device)  # noqa: E731
    monkeypatch.setattr(model, "rows", others)
    comparison = verify_plan(model, one)
    assert {"logits (float32)", "target ids"} < {match.term for match in comparison.matches if match.predicted is None}
    assert report_verification(Console(quiet=True), model, one) is False


@pytest.mark.parametrize("p", [2, 4])
def test_chunks_are_the_models_layers_once(p):
    for model in (SMALL, ODD):
        of_ranks = [chunks_of(model, plan(Parallel(1, False, p), rank=rank)) for rank in range(p)]
        assert [layer for chunks in of_ranks for chunk in chunks for layer in chunk] == list(range(model.num_layers))


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_peak_of_the_papers_models_as_the_search_plans_them(name):
    model, paper = planned_model_of(name), PAPER_MODELS[name]
    cluster = Cluster(paper.parallel.num_devices, 80 * GIBIBYTE)
    (first,) = Request(model, cluster, paper.global_batch_size, {"zero_stage": 0}, everything=True).search().plans
    peak = count_peak(model, first)
    assert peak.measured > 10**8 and not peak.difference, peak


def test_a_wrong_peak_is_found(monkeypatch):
    model, one = CASES["tensor"]
    assert report_verification(Console(quiet=True), model, one) is True
    monkeypatch.setattr("actmem_tools.plan.search.transient", lambda *args: Transient(1, (), {"one byte": 1}))
    assert verify_plan(model, one).exact and count_peak(model, one).difference
    assert report_verification(Console(quiet=True), model, one) is False


def test_a_model_that_this_library_cannot_run():
    with pytest.raises(ConfigError, match="plan: no stage of tied with tied embeddings has been recorded"):
        verify_plan(TIED, plan(Parallel(data_parallel_size=8, zero_stage=3)))


def test_the_embedding_can_be_the_fullest():
    embedding = "_LookupBackward: embedding_dense_backward"
    one = plan(Parallel(1, False, 2))
    transients = [{row.term for row in bill_of(model, one).parts["transient"]} for model in (WORDS, SMALL)]
    assert [embedding in terms for terms in transients] == [True, False]


# Named shapes over every axis.  A rank's bytes depend on the model's depth only by how many layers it holds, so every model
# has a few layers here; sizes of the layer, of the vocabulary and of the sequence are its own.

LAYERS = 4
TENSOR = [(1, False), (2, True), (4, False), (8, True)]
#: Pipeline ranks, chunks of each, and the rank that is run.
PIPELINE = [(1, 1, 0), (2, 1, 1), (4, 1, 0), (2, 2, 0), (2, 2, 1), (4, 1, 2)]
MICRO_BATCHES = [1, 2]
ROUTING = ["even", "one-sided"]
PLANS_OF_EACH = 3


def of_few_layers(name):
    return planned_model_of(name).with_sizes(num_layers=LAYERS)


def nth(values, number):
    return values[number % len(values)]


def cases():
    """Three plans of each model.  Each axis walks through its values at its own pace."""
    for number, name in enumerate(name for name in PLANNED_MODELS for _ in range(PLANS_OF_EACH)):
        model = of_few_layers(name)
        t, sequence_parallel = nth(TENSOR, number)
        p, m, rank = nth(PIPELINE, number + number // len(PIPELINE))
        zero = nth(ZERO_STAGES, number // 2)
        layout = Parallel(t, sequence_parallel, p, num_model_chunks=m, micro_batch_size=nth(MICRO_BATCHES, number // 3), data_parallel_size=1 if zero == 0 else 3, zero_stage=zero)  # fmt: skip
        if model.routing:
            model = model.with_routing(nth(ROUTING, number))
        recompute = nth(model.recompute_modes, number)
        yield model, plan(layout, recompute, 2 * p, rank)


NAMED = list(cases())


def text(case):
    model, plan = case
    layout = plan.layout
    ranks = f"t{layout.tensor_parallel_size}p{layout.pipeline_parallel_size}m{layout.num_model_chunks}"
    return f"{model.name}-{ranks}-zero{layout.zero_stage}-{plan.recompute}{model.routing and '-' + model.routing}"


@pytest.mark.by_day(1)
@pytest.mark.parametrize("case", sampled([pytest.param(case) for case in NAMED], 10), ids=text)
def test_named_shapes(case):
    every_line_and_the_peak_are_what_is_counted(*case)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_named_shapes_under_context_parallelism(name):
    model = of_few_layers(name)
    if not model.context_parallel:
        with pytest.raises(ConfigError, match=f"context_parallel_size: {model.name}"):
            Request(model, Cluster(64, 80 * GIBIBYTE), 64, {"context_parallel_size": 2}).search()
        return
    layout = Parallel(4, True, 2, micro_batch_size=2, context_parallel_size=2)
    every_line_and_the_peak_are_what_is_counted(model, plan(layout, "elementwise", n=4))
