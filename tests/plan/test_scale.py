"""Thousands of GPUs, a trillion parameters, a million tokens: planned, and exact where one rank is emulated."""

import json

import pytest

from actmem.plan.layout import Layout
from actmem.plan.plan_command import main
from actmem.plan.planned_models import planned_model_of
from actmem.plan.search import Plan, find_plans
from actmem.plan.step_time import GIBIBYTE, Cluster, StepSeconds
from actmem.verify import verify_plan
from tests.tiers import at_night

MILLION = 2**20
REQUESTS = {
    "1T on 1,024 GPUs": ["1t", "--gpus", "1024", "--global-batch", "512"],
    "1T on 16,384 GPUs": ["1t", "--gpus", "16384", "--global-batch", "4096"],
    "405B on 16,384 GPUs": ["llama3-405b", "--gpus", "16384", "--global-batch", "2048"],
    "405B, a million tokens": ["llama3-405b", "--gpus", "16384", "--global-batch", "256", "--seq-length", str(MILLION)],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_whole_command_finds_a_plan(name, capsys):
    assert main([*REQUESTS[name], "--memory", "80", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["counted"] > 1000 and out["plans"][0]["bytes"] == out["bill"]["bytes"]


@pytest.mark.parametrize(("gpus", "batch"), [at_night((1024, 512)), at_night((16384, 4096))])
def test_the_fullest_rank_of_a_trillion_parameters_emulated(gpus, batch):
    model = planned_model_of("1t")
    found = find_plans(model, Cluster(gpus, 80 * GIBIBYTE), batch, 1, {"num_model_chunks": 1})
    comparison = verify_plan(model, found.plans[0])
    assert comparison.exact and len(comparison.matched) > 20, comparison.describe()


@pytest.mark.parametrize(("recompute", "rank"), [("full", 31), ("elementwise", 0)])
def test_a_million_tokens_on_an_emulated_rank(recompute, rank):
    model = planned_model_of("llama3-8b").with_sizes(seq_length=MILLION)
    no_time = StepSeconds(0, 0, 0, 0, 0, 0, 0)
    plan = Plan(Layout(4, 8, 32, zero_stage=2), recompute, 0, 1.0, 16, rank, 0, no_time)
    comparison = verify_plan(model, plan)
    assert comparison.exact, comparison.describe()
