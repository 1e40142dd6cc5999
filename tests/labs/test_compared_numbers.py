"""Our own numbers, with which a learner's are compared, are those that are counted, billed or found by trying all."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.rows import total
from actmem_course import reference_layer
from actmem_course.judge.cases import lab1_count_bytes as cases1
from actmem_course.judge.cases.lab3_sequence_parallel import PARTIAL, Scaling
from actmem_course.judge.cases.lab5_pipeline import BUDGETS
from actmem_course.judge.cases.lab8_plan import STATE_PARTS
from actmem_course.judge.outline import load_lab
from actmem_course.judge.saved_bytes import Largest, saved_bytes
from actmem_course.judge.solutions import lab1_count_bytes as lab1
from actmem_course.judge.solutions import lab2_tensor_parallel as lab2
from actmem_course.judge.solutions import lab3_sequence_parallel as lab3
from actmem_course.judge.solutions.lab5_pipeline import how_many_fit
from actmem_course.judge.solutions.lab8_plan import rank_state_bytes
from actmem_course.judge.virtual import VirtualRanks
from actmem_course.strip_solutions import lab_names
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import rows_of_all_modes
from tests.labs.learners import judged
from tests.tiers import at_night


def test_a_rank_keeps_what_is_measured():
    for s, b, h, a, t, sp, recompute in cases1.RANKS:
        counted = sum(cases1.measured(ModelShape(s, b, h, a), t, sp, recompute).values())
        assert lab1.rank_bytes(s, b, h, a, t, sp, recompute) == counted


def test_the_gated_mlp_keeps_what_is_measured():
    for s, b, h, f in cases1.GATED:
        weights = [torch.randn(size, dtype=torch.bfloat16) for size in ((f, h), (f, h), (h, f))]
        x = torch.randn(s, b, h, dtype=torch.bfloat16)
        assert lab1.gated_mlp_bytes(s, b, h, f) == saved_bytes(lab1.gated_mlp, x, weights).bytes


def test_the_peak_is_of_what_lives_after_an_operation():
    with Largest() as made:
        x = torch.zeros(100)  # 400 bytes
        for _ in range(3):
            y = torch.zeros(50) + 1  # 200, and 200 that go at once, while the last 200 are there
        assert (made.peak, made.elements) == (1000, 100)
        del y
        x.untyped_storage().resize_(0)
        z = torch.zeros(190)  # 760, alone
        assert made.peak == 1000
        z.resize_(260)
        assert made.peak == 1040 and "float32 [190] of 760 B" in made.most()


def test_the_core_keeps_more_from_there_on():
    for h, a in cases1.CROSSOVERS:
        for s, more in ((lab1.crossover_seq_length(h, a), True), (lab1.crossover_seq_length(h, a) - 1, False)):
            rows = cases1.measured(ModelShape(s, 1, h, a))
            core = sum(size for term, size in rows.items() if term in CORE_ATTENTION_TERMS)
            assert (core > sum(rows.values()) - core) == more


def test_the_most_that_fit():
    for budget, flight, full, recomputed in BUDGETS:
        fitting = [k for k in range(flight + 1) if k * full + (flight - k) * recomputed <= budget]
        assert how_many_fit(budget, flight, full, recomputed) == max(fitting, default=-1)


@pytest.mark.parametrize("stage", range(4))
def test_the_states_are_those_of_the_bill(stage):
    model = planned_model_of("22b")
    for t, dp in ((1, 7), (8, 7), (2, 64), (4, 3), (8, 11)):
        parameters = total(rows_of_all_modes(model, Parallel(t, True, zero_stage=0), 0)["weights"]) // 2
        parts = rows_of_all_modes(model, Parallel(t, True, data_parallel_size=dp, zero_stage=stage), 0)
        billed = {part: total(parts[part]) for part in STATE_PARTS}
        assert rank_state_bytes(parameters, dp, stage) == billed


S, B, HEADS = 8, 2, 8
H = 4 * HEADS


def whole_layer(x, w):
    return reference_layer.layer(x, w, cast(reference_layer.Dropouts, Scaling()))


def sharded_layer(x, w, group, linear):
    return lab3.layer(x, w, cast(reference_layer.Dropouts, Scaling()), linear, group)


#: The uncut function, ours, and whether tokens are cut.
CASES: dict[str, Any] = {
    "mlp": (
        reference_layer.mlp,
        lambda x, w, group: lab2.mlp(x, w.up_weight, w.up_bias, w.down_weight, w.down_bias, group),
        False,
    ),
    "attention": (
        reference_layer.attention,
        lambda x, w, group: lab2.attention(
            x, w.qkv_weight, w.qkv_bias, w.projection_weight, w.projection_bias, HEADS, group
        ),
        False,
    ),
}
for linear in (lab3.gathering_linear, lab3.shard_keeping_linear):
    CASES[f"layer with {linear.__name__}"] = whole_layer, partial(sharded_layer, linear=linear), True


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_ranks_together_are_the_uncut_block(case, t):
    uncut, ours, cut = CASES[case]
    torch.manual_seed(3)
    w = reference_layer.random_weights(H, HEADS, seed=4).map(
        lambda name, x: (x + 0.1 * torch.randn_like(x)).requires_grad_()
    )
    x, upstream = (torch.randn(S, B, H, dtype=torch.float64) for _ in range(2))
    whole = x.clone().requires_grad_()
    y = uncut(whole, w)
    y.backward(upstream)
    names = {name for name, weight in w.named().items() if weight.grad is not None}
    inputs, above = (tensor.chunk(t) if cut else [tensor] * t for tensor in (x, upstream))

    def run(rank):
        own = w.map(lambda name, x: x.detach()).part(rank.number, t).map(lambda name, x: x.clone().requires_grad_())
        leaf = inputs[rank.number].clone().requires_grad_()
        result = ours(leaf, own, dist.group.WORLD)
        result.backward(above[rank.number])
        return result.detach(), leaf.grad, {name: getattr(own, name).grad for name in names}

    results, gradients, of_weights = zip(*VirtualRanks(t).run(run))
    join = torch.cat if cut else lambda parts: parts[0]
    torch.testing.assert_close(join(results), y.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(join(gradients), whole.grad, rtol=0, atol=1e-9)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in w.named().items()}
    everything = reference_layer.LayerWeights(HEADS, **grads)
    for rank in range(t):
        for name in names - (set(PARTIAL) if cut else set()):
            right = getattr(everything.part(rank, t), name)
            torch.testing.assert_close(of_weights[rank][name], right, rtol=0, atol=1e-9)
    for name in PARTIAL if cut else ():
        total = sum(own[name] for own in of_weights)
        torch.testing.assert_close(total, getattr(w, name).grad, rtol=0, atol=1e-9)


ODD: dict[str, Callable[..., Any]] = {
    "nothing": lambda *args, **kwargs: None,
    "a number": lambda *args, **kwargs: 1.5,
    "a long word": lambda *args, **kwargs: "ready" * 10**5,
    "a number that nothing can print": lambda *args, **kwargs: 10**5000,
    "an empty list": lambda *args, **kwargs: [],
    "a small tensor": lambda *args, **kwargs: torch.zeros(2),
    "its first argument": lambda *args, **kwargs: args[0],
    "no arguments": lambda: None,
}


@pytest.mark.by_day(4)
@pytest.mark.parametrize("lab", [at_night(lab) if lab == "lab6_train" else lab for lab in lab_names()])
def test_odd_answers(lab):
    for exercise in load_lab(lab).exercises:
        for odd, answer in ODD.items():
            verdict = judged(exercise.number, answer, size=2)
            assert verdict.status in ("wrong", "error"), (odd, verdict)
            assert 15 < len(verdict.diagnosis) < 1500, (odd, verdict)  # eight of them fit into a pipe
            assert not verdict.where or verdict.where.startswith("test_compared_numbers.py"), (odd, verdict)
            assert "actmem" not in verdict.diagnosis, (odd, verdict)
