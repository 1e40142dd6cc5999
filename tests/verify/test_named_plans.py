"""Plans of every named shape over every axis that this library runs: each line and the peak are what is counted.

A rank's bytes depend on the model's depth only by how many layers it holds, so every model has a few
layers here; sizes of the layer, of the vocabulary and of the sequence are its own.
"""

import pytest

from actmem.config import ZERO_STAGES, ConfigError, Layout
from actmem.plan.planned_models import PLANNED_MODELS, planned_model_of
from actmem.plan.search import Plan, find_plans
from actmem.plan.step_time import GIBIBYTE, Cluster, StepSeconds
from actmem.rows import total
from actmem.verify import count_peak, verify_plan
from tests.tiers import sampled

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
        layout = Layout(1 if zero == 0 else 3, t, p, nth(MICRO_BATCHES, number // 3), m,
                        sequence_parallel=sequence_parallel, zero_stage=zero)  # fmt: skip
        if model.routing:
            model = model.with_routing(nth(ROUTING, number))
        recompute = nth(model.recompute_modes, number)
        whole = 1 if rank == 0 and m == 1 and recompute != "none" else 0
        yield model, Plan(layout, recompute, whole, 1.0, 2 * p, rank, 0, StepSeconds(0, 0, 0, 0, 0, 0, 0))


CASES = list(cases())


def text(case):
    model, plan = case
    layout = plan.layout
    ranks = f"t{layout.tensor_parallel_size}p{layout.pipeline_parallel_size}m{layout.num_model_chunks}"
    return f"{model.name}-{ranks}-zero{layout.zero_stage}-{plan.recompute}{model.routing and '-' + model.routing}"


@pytest.mark.parametrize("case", sampled([pytest.param(case) for case in CASES], 10), ids=text)
def test_every_line_and_the_peak_are_what_is_counted(case):
    model, plan = case
    comparison, peak = verify_plan(model, plan), count_peak(model, plan)
    assert comparison.exact, comparison.describe()
    assert peak.measured > 10**6 and not peak.difference, peak


def test_the_plans_cover_every_axis():
    layouts = [plan.layout for _, plan in CASES]
    assert {model.name for model, _ in CASES} == {planned_model_of(name).name for name in PLANNED_MODELS}
    assert {(each.tensor_parallel_size, each.sequence_parallel) for each in layouts} == set(TENSOR)
    pipeline = {
        (plan.layout.pipeline_parallel_size, plan.layout.num_model_chunks, plan.pipeline_rank) for _, plan in CASES
    }
    assert pipeline == set(PIPELINE)
    assert {each.zero_stage for each in layouts} == set(ZERO_STAGES)
    assert {each.micro_batch_size for each in layouts} == set(MICRO_BATCHES)
    modes = {(type(model), plan.recompute) for model, plan in CASES}
    assert modes == {(type(model), mode) for model, _ in CASES for mode in model.recompute_modes}
    assert {model.routing for model, _ in CASES} == {"", *ROUTING}
    assert any(plan.whole_microbatches for _, plan in CASES)


@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_an_axis_that_a_model_lacks_is_one_line(name):
    model = planned_model_of(name)
    if not model.context_parallel:
        with pytest.raises(ConfigError, match=f"context_parallel_size: {model.name}"):
            find_plans(model, Cluster(64, 80 * GIBIBYTE), 64, 1, {"context_parallel_size": 2})


@pytest.mark.parametrize("name", [name for name in PLANNED_MODELS if planned_model_of(name).context_parallel])
def test_every_line_and_the_peak_under_context_parallelism(name):
    layout = Layout(1, 4, 2, 2, context_parallel_size=2)
    plan = Plan(layout, "elementwise", 0, 1.0, 4, 0, 0, StepSeconds(0, 0, 0, 0, 0, 0, 0))
    comparison, peak = verify_plan(of_few_layers(name), plan), count_peak(of_few_layers(name), plan)
    assert comparison.exact, comparison.describe()
    assert peak.measured > 10**6 and not peak.difference, peak


@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_only_experts_have_a_routing(name):
    model = planned_model_of(name)
    if not model.routing:
        with pytest.raises(ConfigError, match="routing: .* has no experts"):
            model.with_routing("one-sided")
        return
    worst = model.with_routing("one-sided")
    layout = Layout(tensor_parallel_size=4)
    assert total(worst.rows(layout, "none")) > total(model.rows(layout, "none"))
    with pytest.raises(ConfigError, match="routing: must be one of even, one-sided"):
        model.with_routing("learned")
