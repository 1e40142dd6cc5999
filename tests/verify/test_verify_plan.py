"""Plans of every axis that this library runs, emulated: every line of their bills is what is counted."""

from copy import copy
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from actmem.config import ConfigError, ModelShape
from actmem.models import PAPER_MODELS
from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedGPT, PlannedLlama, planned_model_of
from actmem.plan.rank_bill import rank_bill
from actmem.plan.search import Plan, find_plans
from actmem.plan.step_time import GIBIBYTE, Cluster, StepSeconds
from actmem.rows import Row, compare
from actmem.verify import chunks_of, count_peak, report_verification, verify_plan
from tests.shapes import decoder
from tests.tiers import covering, sampled

#: Small, with all sizes different; 7 layers can't be spread evenly over 2 or 4 ranks.
SMALL = PlannedGPT("small", ModelShape(64, 1, 96, 8, num_layers=8, vocab_size=256))
ODD = PlannedGPT("odd", ModelShape(64, 1, 96, 8, num_layers=7, vocab_size=256))
LLAMA = PlannedLlama("llama", decoder(128, 352, 4, 8, 4, 257))
QWEN3 = PlannedLlama("qwen3", decoder(128, 352, 4, 8, 4, 257, head_size=24, qk_norm=True))
TIED = PlannedLlama("tied", decoder(128, 352, 4, 8, 4, 257, tied_embeddings=True))
NO_TIME = StepSeconds(0, 0, 0, 0, 0, 0, 0)


def plan(layout, recompute="none", n=16, rank=0, whole=0):
    return Plan(layout, recompute, whole, 1.0, n, rank, 0, NO_TIME)


CASES = {
    "one device": (SMALL, plan(Layout(sequence_parallel=False))),
    "tensor": (SMALL, plan(Layout(1, 4, sequence_parallel=False), "selective")),
    "tensor and sequence": (SMALL, plan(Layout(1, 8), "elementwise")),
    "larger microbatches": (SMALL, plan(Layout(1, 2, micro_batch_size=3), "full")),
    "pipeline, first": (SMALL, plan(Layout(1, 2, 4), "none")),
    "pipeline, second": (SMALL, plan(Layout(1, 2, 4), "selective", rank=1)),
    "pipeline, last": (SMALL, plan(Layout(1, 2, 4), "elementwise", rank=3)),
    "few microbatches": (SMALL, plan(Layout(1, 2, 4), "none", n=2)),
    "chunks, first": (SMALL, plan(Layout(1, 2, 2, num_model_chunks=2), "none")),
    "chunks, last": (SMALL, plan(Layout(1, 2, 2, num_model_chunks=4), "full", rank=1)),
    "appendix C": (SMALL, plan(Layout(1, 2, 4), "selective", whole=3)),
    "data parallel": (SMALL, plan(Layout(4, 2, zero_stage=0), "selective")),
    "ZeRO-1": (SMALL, plan(Layout(3, 2, zero_stage=1), "none")),
    "ZeRO-2": (SMALL, plan(Layout(5, 2, zero_stage=2), "none")),
    "ZeRO-3": (SMALL, plan(Layout(7, 2, zero_stage=3), "none")),
    "uneven, first": (ODD, plan(Layout(1, 2, 4), "selective")),
    "uneven, second": (ODD, plan(Layout(1, 2, 4), "selective", rank=1)),
    "uneven, last": (ODD, plan(Layout(1, 2, 4), "none", rank=3)),
    "llama, one device": (LLAMA, plan(Layout(sequence_parallel=False))),
    "llama, tensor": (LLAMA, plan(Layout(1, 2, sequence_parallel=False), "elementwise")),
    "llama, more ranks than key heads": (LLAMA, plan(Layout(1, 8), "none")),
    "llama, pipeline": (LLAMA, plan(Layout(1, 2, 2, 3), "full")),
    "llama, last": (LLAMA, plan(Layout(2, 2, 2), "elementwise", rank=1)),
    "llama, chunks": (LLAMA, plan(Layout(1, 4, 2, num_model_chunks=2), "none", rank=1)),
    "llama, appendix C": (LLAMA, plan(Layout(1, 2, 4), "elementwise", whole=2)),
    "qwen3, more ranks than key heads": (QWEN3, plan(Layout(1, 8), "elementwise")),
    "qwen3, last": (QWEN3, plan(Layout(2, 2, 2), "none", rank=1)),
    "qwen3, tensor": (QWEN3, plan(Layout(1, 4, sequence_parallel=False), "full")),
    "llama, ZeRO-3": (LLAMA, plan(Layout(3, 2, zero_stage=3), "none")),
}


CONTEXT = {
    "alone": (LLAMA, plan(Layout(2, context_parallel_size=4, zero_stage=2))),
    "with tensor": (LLAMA, plan(Layout(1, 8, context_parallel_size=2), "elementwise")),
    "with pipeline": (LLAMA, plan(Layout(1, 2, 2, 3, context_parallel_size=2), "full", rank=1)),
    "norms over heads": (QWEN3, plan(Layout(1, 2, 2, context_parallel_size=2), "none")),
}


@pytest.mark.parametrize("case", sampled(CASES, 12))
def test_every_line_is_what_is_counted(case):
    comparison = verify_plan(*CASES[case])
    assert comparison.exact, comparison.describe()
    assert {"parameters", "gradients", "Adam first moment"} <= {match.term for match in comparison.matched}


def test_a_plan_of_the_largest_model_as_the_search_finds_it():
    model, paper = planned_model_of("1t"), PAPER_MODELS["1T"]
    found = find_plans(
        model, Cluster(paper.num_devices, 80 * GIBIBYTE), paper.global_batch_size, 30, {"num_model_chunks": 1}
    )
    chosen = max(found.plans, key=lambda each: each.layout.pipeline_parallel_size)
    comparison = verify_plan(model, chosen)
    assert comparison.exact, comparison.describe()


def test_a_wrong_line_is_found(monkeypatch):
    model, one = CASES["tensor"]
    model = copy(model)  # what bills share is remembered for a model
    rows = model.rows
    monkeypatch.setattr(
        model, "rows", lambda layout, what, *device: [] if what == "last" else rows(layout, what, *device)
    )
    comparison = verify_plan(model, one)
    assert {"logits (float32)", "target ids"} < {match.term for match in comparison.extra}
    assert report_verification(Console(quiet=True), model, one) is False


@pytest.mark.parametrize("p", [2, 4])
def test_chunks_are_the_models_layers_once(p):
    for model in (SMALL, ODD):
        of_ranks = [chunks_of(model, plan(Layout(1, 1, p, sequence_parallel=False), rank=rank)) for rank in range(p)]
        assert [layer for chunks in of_ranks for chunk in chunks for layer in chunk] == list(range(model.num_layers))


@pytest.mark.parametrize("case", sampled(CASES, 12))
def test_the_peak_is_what_is_counted(case):
    peak = count_peak(*CASES[case])
    assert peak.measured > 0 and not peak.difference, peak


@pytest.mark.parametrize(
    ("name", "recompute"),
    covering(["llama3-8b", "llama3-70b", "llama3-405b", "qwen3-32b"], ["none", "elementwise", "full"], of=1),
)
def test_the_peak_of_each_decoder(name, recompute):
    model = planned_model_of(name)
    for rank, layout in (
        (0, Layout(1, 8, model.num_layers // 2)),
        (model.num_layers // 2 - 1, Layout(2, 4, model.num_layers // 2)),
    ):
        peak = count_peak(model, plan(layout, recompute, rank=rank))
        assert peak.measured > 10**8 and not peak.difference, peak


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_peak_of_the_papers_models_as_the_search_plans_them(name):
    model, paper = planned_model_of(name), PAPER_MODELS[name]
    cluster = Cluster(paper.num_devices, 80 * GIBIBYTE)
    (fastest,) = find_plans(model, cluster, paper.global_batch_size, 1, {"zero_stage": 0}).plans
    peak = count_peak(model, fastest)
    assert peak.measured > 10**8 and not peak.difference, peak


def test_a_wrong_peak_is_found(monkeypatch):
    model, one = CASES["tensor"]
    monkeypatch.setattr("actmem.plan.rank_bill.transient_rows", lambda *args: [Row("one byte", 1)])
    assert verify_plan(model, one).exact and count_peak(model, one).difference
    assert report_verification(Console(quiet=True), model, one) is False


def test_a_model_that_this_library_cannot_run():
    with pytest.raises(ConfigError, match="verify: this library runs no stage of tied yet"):
        verify_plan(TIED, plan(Layout(8, zero_stage=3)))


@pytest.mark.parametrize("case", CONTEXT)
def test_every_line_and_the_peak_under_context_parallelism(case):
    comparison, peak = verify_plan(*CONTEXT[case]), count_peak(*CONTEXT[case])
    assert comparison.exact, comparison.describe()
    assert peak.measured > 0 and not peak.difference, peak


def test_the_report_says_the_lines_and_the_peak():
    console = Console(record=True, width=120, quiet=False, file=StringIO())
    assert report_verification(console, LLAMA, plan(Layout(1, 2, context_parallel_size=2))) is True
    text = console.export_text()
    assert "lines equal what is counted" in text and "Beyond that, at the peak" in text and "difference 0" in text


@pytest.mark.parametrize(
    ("name", "p"), [("llama3-8b", 32), ("llama3-70b", 80), ("llama3-405b", 126), ("qwen3-32b", 64)]
)
def test_one_layer_a_rank_of_each_decoder(name, p):
    model = planned_model_of(name)
    comparison = verify_plan(model, plan(Layout(1, 8, p), "elementwise", n=3, rank=p - 1))
    assert comparison.exact, comparison.describe()


def test_the_bill_of_another_layout_does_not_agree():
    model, one = CASES["tensor and sequence"]
    other = rank_bill(model, replace(one.layout, sequence_parallel=False), "elementwise", 16, 0, device_type="cpu")
    own = rank_bill(model, one.layout, "elementwise", 16, 0, device_type="cpu")
    assert not compare(own.parts["activations"], other.parts["activations"]).exact
