"""Plans: the paper's, every bill to the byte, and the model of time that orders them."""

from dataclasses import replace

import pytest
import torch

from actmem.config import PAPER_MODELS, TINY, ConfigError, Parallel
from actmem.formulas.stages import stage_rows
from actmem.formulas.states import state_rows
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.rows import by_term
from actmem_course.others.paper import A100_BYTES, TABLE5
from actmem_tools.measured_parts import run_part
from actmem_tools.plan.frameworks import some_framework_runs
from actmem_tools.plan.plan_report import fixed_sizes_text, plan_text
from actmem_tools.plan.planned_models import PLANNED_MODELS, PlannedGPT, planned_model_of
from actmem_tools.plan.search import (
    Plan,
    Request,
    bill_of,
    layouts,
    rank_bill,
    rows_of_all_modes,
    stage_layers,
)
from actmem_tools.plan.step_time import (
    DEVICES,
    GIBIBYTE,
    LINK_SHARE,
    MODEL_ERROR,
    Cluster,
    Shards,
    StepSeconds,
    data_seconds,
)
from actmem_tools.verify import verify_plan
from tests.tiers import at_night


def a100(gpus, **others):
    return Cluster(gpus, A100_BYTES, device=DEVICES["a100"], **others)


def searched(model, cluster, batch, fixed):
    """All plans, also those that no framework runs whose settings are printed; and the fastest of them."""
    found = Request(model, cluster, batch, fixed, everything=True).search(10**6)
    return found, min(found.plans, key=lambda plan: plan.order, default=None)


def is_the_papers(plan, model):
    names = "tensor_parallel_size", "pipeline_parallel_size", "num_model_chunks"
    same = all(getattr(plan.layout, name) == getattr(model.parallel, name) for name in names)
    return same and plan.layout.micro_batch_size == model.shape.micro_batch_size


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_papers_plan_fits_is_near_the_fastest_and_needs_no_full_recomputation(name):
    model = PAPER_MODELS[name]
    # What the paper had: its three modes, and no optimizer states divided among data-parallel ranks.
    gpt = PlannedGPT(name, model.shape).with_modes(["none", "selective", "full"])
    found, fastest = searched(gpt, a100(model.parallel.num_devices), model.global_batch_size, {"zero_stage": 0})
    own = [plan for plan in found.plans if is_the_papers(plan, model) and plan.layout.sequence_parallel]
    assert len(own) == 1 and own[0].recompute in ("none", "selective")
    assert own[0].seconds.total <= (1 + MODEL_ERROR) * fastest.seconds.total
    # Without sequence parallelism the paper's baseline needs full recomputation.
    baseline = [plan for plan in found.plans if is_the_papers(plan, model) and not plan.layout.sequence_parallel]
    assert all(plan.recompute == "full" and plan.seconds.total > 1.2 * own[0].seconds.total for plan in baseline)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_every_plan_is_its_bill_to_the_byte(name):
    model = planned_model_of(name)
    found, _ = searched(model, Cluster(256, 80 * GIBIBYTE), 256, {})
    every = max(1, len(found.plans) // 30)
    assert found.plans or found.nearest
    for plan in found.plans[::every]:
        bill = bill_of(model, plan)
        assert bill.bytes == plan.bytes <= 76 * GIBIBYTE
        p = plan.layout.pipeline_parallel_size
        for rank in {0, min(1, p - 1), min(2, p - 1), p // 2, p - 1}:
            assert rank_bill(model, plan.layout, plan.recompute, plan.num_microbatches, rank).bytes <= plan.bytes
    for refused in found.nearest[:: max(1, len(found.nearest) // 10)]:
        bill = rank_bill(model, refused.layout, refused.recompute, refused.num_microbatches, refused.pipeline_rank)
        assert bill.bytes == refused.bytes > 76 * GIBIBYTE


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_bill_holds_the_papers_rows(name, recompute):
    model = PAPER_MODELS[name]
    own = model.parallel
    layout = replace(own, sequence_parallel=True, micro_batch_size=model.shape.micro_batch_size, zero_stage=0)
    n = layout.num_microbatches(model.global_batch_size)
    for rank in (0, own.pipeline_parallel_size - 1):
        bill = rank_bill(PlannedGPT(name, model.shape), layout, recompute, n, rank)
        sizes = model.shape, own, rank, recompute, n
        paper = by_term(stage_rows(*sizes, device_type="cuda"))
        assert by_term([*bill.parts["activations"], *bill.parts["logits and loss"]]) == paper
        states = [*bill.parts["weights"], *bill.parts["gradients"], *bill.parts["optimizer states"]]
        assert by_term(states) == by_term(state_rows(model.shape, own, rank))


def test_zero_divides_what_it_says():
    model = planned_model_of("22b")
    bills = [
        rank_bill(model, Parallel(4, True, data_parallel_size=8, zero_stage=stage), "full", 1, 0).by_part()
        for stage in range(4)
    ]
    n = bills[0]["weights"] // 2
    assert [bill["optimizer states"] for bill in bills] == [12 * n, *[12 * -(-n // 8)] * 3]
    assert [bill["gradients"] for bill in bills] == [4 * n, 4 * n, *[4 * -(-n // 8)] * 2]
    assert [bill["weights"] for bill in bills] == [2 * n, 2 * n, 2 * n, 2 * -(-n // 8)]


def test_other_optimizers_keep_other_states():
    model = planned_model_of("22b")
    adam, eight, momentum, sgd = (
        rank_bill(model.with_optimizer(name), Parallel(4, True, data_parallel_size=8), "full", 1, 0).by_part()
        for name in ("adamw", "adamw8bit", "momentum", "sgd")
    )
    share = adam["optimizer states"] // 12
    assert [eight["optimizer states"], momentum["optimizer states"]] == [6 * share + 8 * -(-share // 256), 8 * share]
    assert sgd["optimizer states"] == 4 * share
    assert all({**each, "optimizer states": 0} == {**adam, "optimizer states": 0} for each in (eight, momentum, sgd))


def test_a_precision_keeps_what_a_run_keeps():
    """Of bf16 by a run; of Megatron-LM's by its own parser's dtypes (test_framework_flags)."""
    model = PlannedGPT("tiny", TINY)
    gpt = GPT(TINY, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(gpt.parameters())
    run_part(gpt).backward()
    optimizer.step()
    moments = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    held = [sum(p.nbytes for p in gpt.parameters()), sum(p.grad.nbytes for p in gpt.parameters()), moments]
    bills = {
        name: [*rank_bill(model.with_optimizer("adamw", name), Parallel(), "none", 1, 0).by_part().values()][:3]
        for name in ("mixed", "bf16-gradients", "bf16-states", "bf16")
    }
    assert bills["bf16"] == held
    assert [2 * sum(parts) / held[0] for parts in bills.values()] == [18, 14, 10, 8]  # bytes of each weight


def test_fp8s_lines_are_its_rule_worked_out_by_hand():
    """A layer of Llama 3 8B on one of two ranks: 8,192 tokens, h = 4,096, f = 14,336, 1,024 elements of keys."""

    def bill(precision, recompute):
        model = planned_model_of("llama3-8b").with_sizes(num_layers=1).with_optimizer("adamw", precision)
        parts = rank_bill(model, Parallel(2, True), recompute, 1, 0).parts
        return by_term(row for rows in parts.values() for row in rows)

    copies = {
        "FP8 copies of weights: by rule, not run": 218_103_808,  # 2 · (2 · 4,096 · 5,120 + 3 · 4,096 · 14,336) / 2
        "FP8 copies, at most: by rule, not run": 293_601_280,  # 5 · 8,192 · 14,336 / 2
    }
    assert bill("fp8", "full") == {**bill("mixed", "full"), **copies}
    inputs = {"QKV projection": 16_777_216, "gate and up": 16_777_216, "down": 58_720_256}  # 8,192 · h / 2, and of f
    in_16_bits = {f"{linear} input": 2 * size for linear, size in inputs.items()}
    in_fp8 = {f"{linear} input, FP8: by rule, not run": size for linear, size in inputs.items()}
    unchanged = dict(bill("mixed", "none").items() - in_16_bits.items())
    assert bill("mixed", "none") == {**unchanged, **in_16_bits}
    assert bill("fp8", "none") == {**unchanged, **in_fp8, **copies}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 4), [32] * 4),
        ((126, 16), [7, *[8] * 14, 7]),
        ((61, 4), [15, 16, 16, 14]),
        ((126, 8, 8), [15, *[16] * 6, 15]),
    ],
)
def test_layers_are_spread_and_ends_hold_fewer(sizes, expected):
    assert stage_layers(*sizes) == tuple(expected) and sum(expected) == sizes[0]


@pytest.mark.parametrize("sizes", [(5, 4), (5, 2, 2), (9, 4, 3)])
def test_layers_that_cannot_be_spread(sizes):
    with pytest.raises(ConfigError, match="can't be spread over pipeline_parallel_size"):
        stage_layers(*sizes)


def test_every_layout_uses_all_gpus_and_the_whole_batch():
    model = PlannedGPT("tiny", TINY)
    found = list(layouts(model, Cluster(16, 8 * GIBIBYTE), 32))
    assert len(set(found)) == len(found)
    assert all(each.sequence_parallel <= (each.tensor_parallel_size > 1) for each in found)
    assert all(each.num_devices == 16 and 32 % (each.data_parallel_size * each.micro_batch_size) == 0 for each in found)


def test_zero_3_gathers_two_layers_and_the_ends_of_this_rank():
    h, v, s = TINY.hidden_size, TINY.vocab_size, TINY.seq_length
    layout = Parallel(1, False, 4, data_parallel_size=2, zero_stage=3)
    buffers = [rows_of_all_modes(PlannedGPT("tiny", TINY), layout, rank)["communication buffers"] for rank in range(4)]
    sizes = [by_term(rows)["gathered weights"] for rows in buffers]
    two_layers = 2 * sum(weight.numel() for weight in TransformerLayer(TINY, device="meta").parameters())
    assert sizes == [2 * (two_layers + end) for end in ((v + s) * h, 0, 0, v * h + 2 * h)]


MILLION = 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "rank"), [at_night(("full", 31)), ("elementwise", 0)])
def test_a_million_tokens_on_an_emulated_rank(recompute, rank):
    model = planned_model_of("llama3-8b").with_sizes(seq_length=MILLION)
    no_time = StepSeconds(0, 0, 0, 0, 0, 0, 0)
    plan = Plan(Parallel(8, True, 32, data_parallel_size=4, zero_stage=2), recompute, 16, rank, 0, no_time)
    comparison = verify_plan(model, plan)
    assert comparison.exact, comparison.describe()


#: Layouts that others trained with: model, GPUs, sequences of a step, sizes.  The first two and 175B: NVIDIA's
#: recipes for H100; the third 2407.21783 table 4; the fourth Megatron Bridge's.
PUBLISHED = {
    "70B on 64": ("llama3-70b", 64, 128, {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "context_parallel_size": 2, "num_model_chunks": 5}),
    "405B on 512": ("llama3-405b", 512, 256, {"tensor_parallel_size": 8, "pipeline_parallel_size": 8, "context_parallel_size": 2, "num_model_chunks": 8}),
    "405B on 16,384": ("llama3-405b", 16384, 2048, {"tensor_parallel_size": 8, "pipeline_parallel_size": 16, "data_parallel_size": 128}),
    "Qwen3-30B-A3B on 16": ("qwen3-30b-a3b", 16, 512, {"tensor_parallel_size": 1, "expert_parallel_size": 16}),
    "175B on 128": ("175b", 128, 256, {"tensor_parallel_size": 4, "pipeline_parallel_size": 8, "num_model_chunks": 6}),
}  # fmt: skip
#: What the last part of the reason names where a published layout is not near the first.
REASONS = {"405B on 512": "recompute", "405B on 16,384": "bubble"}


@pytest.mark.by_day(5)
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_layouts_are_near_the_first_or_the_reason_is_printed(case):
    name, gpus, batch, sizes = PUBLISHED[case]
    request = Request(planned_model_of(name), Cluster(gpus, 80 * GIBIBYTE), batch)
    first = request.search(5).plans
    own = replace(request, fixed=sizes)
    published = min(own.search(100).plans, key=lambda plan: plan.seconds.total)
    listed = any(sizes.items() <= vars(plan.layout).items() for plan in first)
    if listed or published.seconds.total <= 1.05 * first[0].seconds.total:
        assert case not in REASONS
        return
    text = fixed_sizes_text(own, published)
    assert f"the first plan is {plan_text(first[0])}" in text and "longer (more: " in text
    assert f"{REASONS[case]} " in text and "GiB too much on pipeline rank" in text


def test_within_the_error_of_times_plans_are_ranked_by_what_can_go_wrong():
    plans = Request(planned_model_of("llama3-70b"), Cluster(64, 80 * GIBIBYTE), 128).search(10**5).plans
    fastest = min(plan.seconds.total for plan in plans)
    near = [plan for plan in plans if plan.seconds.total <= (1 + MODEL_ERROR) * fastest]
    assert plans[: len(near)] == near and [p.seconds.total for p in plans[len(near) :]] == sorted(
        plan.seconds.total for plan in plans[len(near) :]
    )
    keys = [(int(p.seconds.hidden / p.seconds.total / MODEL_ERROR), p.layout.zero_stage) for p in near]
    assert keys == sorted(keys) and len({*keys}) > 2
    assert all(some_framework_runs(PLANNED_MODELS["llama3-70b"], p.layout, p.recompute) for p in plans)


def test_overlaps_that_exclude_each_other_are_not_both_counted():
    """Before Blackwell sharded data parallelism leaves no queue for tensor parallelism's."""
    sizes = {"tensor_parallel_size": 4, "sequence_parallel": True, "pipeline_parallel_size": 1, "micro_batch_size": 1}
    found = {}
    for both in (False, True):
        cluster = Cluster(8, 80 * GIBIBYTE, device=replace(DEVICES["h100"], hides_both=both))
        for stage in (1, 2):
            model = planned_model_of("llama3-8b").with_modes(["full"])
            request = Request(model, cluster, 64, {**sizes, "context_parallel_size": 1, "zero_stage": stage})
            found[both, stage] = request.search().plans[0].seconds.tensor
    assert found[False, 1] == found[True, 1] == found[True, 2] < found[False, 2]


CLUSTER = Cluster(64, 80 * GIBIBYTE)
SHARDS = Shards(10**8, 10**7, 12)


def layout(stage, p=1, m=1):
    return Parallel(1, False, p, num_model_chunks=m, data_parallel_size=64 // p, zero_stage=stage)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3)])
def test_room_moves_seconds_from_waiting_to_hidden(stage, p, m):
    runs = [data_seconds(SHARDS, layout(stage, p, m), 8, (room, 2 * room), CLUSTER) for room in (0.0, 1e-4, 1e-3, 1e9)]
    waiting = [each for each, _ in runs]
    assert runs[0][1] == pytest.approx(0) and waiting == sorted(waiting, reverse=True) and waiting[-1] > 0
    assert all(sum(run) == pytest.approx(sum(runs[0])) for run in runs)


def test_the_first_weights_and_the_last_gradients_never_hide():
    ranks, n = 64, 8
    per_byte = (ranks - 1) / ranks / CLUSTER.link(ranks, 1)
    latency = CLUSTER.latency(ranks, 1)
    passes = {0: (0, 2), 1: (1, 1), 2: (1, n), 3: (n, n)}
    for stage, (gathers, reduces) in passes.items():
        waiting, _ = data_seconds(SHARDS, layout(stage), n, (1e9, 1e9), CLUSTER)
        elements = SHARDS.of_layer + SHARDS.of_ends
        closed = (2 * gathers + 4 * reduces) * elements * per_byte + 2 * (gathers + reduces) * latency
        assert waiting == pytest.approx(closed)


def test_a_group_has_the_ports_of_all_its_members_in_a_node():
    port, node = CLUSTER.device.network_bytes_per_second, CLUSTER.device.node_bytes_per_second
    assert [CLUSTER.link(64 // t, t) / LINK_SHARE for t in (1, 2, 4, 8)] == [8 * port, 4 * port, 2 * port, port]
    assert CLUSTER.link(8, 1) == CLUSTER.link(2, 4) == LINK_SHARE * node
    fast = replace(CLUSTER, device=replace(CLUSTER.device, network_bytes_per_second=node))
    assert fast.link(64, 1) == LINK_SHARE * node


def test_tensor_traffic_beside_backward_leaves_data_traffic_less_room():
    model, sizes = planned_model_of("llama3-8b"), {"tensor_parallel_size": 4, "data_parallel_size": 2, "zero_stage": 3}
    # Eight GPUs on one node's links, and in nodes of four, where data-parallel ranks have the network.
    seconds = [
        searched(model, Cluster(8, 80 * GIBIBYTE, per_node, device), 8, sizes)[1].seconds
        for per_node in (8, 4)
        for device in (replace(DEVICES["b200"], node_bytes_per_second=10**10, network_bytes_per_second=10**10),)
    ]
    assert seconds[0].tensor == seconds[1].tensor and seconds[0].data > seconds[1].data


def test_the_papers_own_times_are_as_near_as_plans_that_are_called_equal():
    off = []
    for name, printed in TABLE5.items():
        paper = PAPER_MODELS[name]
        sizes = {
            "tensor_parallel_size": paper.parallel.tensor_parallel_size,
            "pipeline_parallel_size": paper.parallel.pipeline_parallel_size,
            "num_model_chunks": paper.parallel.num_model_chunks,
            "micro_batch_size": paper.shape.micro_batch_size,
        }
        cluster = Cluster(paper.parallel.num_devices, 2**20 * GIBIBYTE, device=DEVICES["a100"])
        for mode, seconds in (("selective", printed.seconds), ("full", printed.full_recompute_seconds)):
            model = planned_model_of(name).with_modes([mode])
            fixed = {**sizes, "sequence_parallel": mode == "selective"}
            _, fastest = searched(model, cluster, paper.global_batch_size, fixed)
            off.append(abs(fastest.seconds.total / seconds - 1))
    assert sorted(off)[6] < MODEL_ERROR < sorted(off)[7]
