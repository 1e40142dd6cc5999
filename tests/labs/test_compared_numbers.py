"""Our own numbers, with which a learner's are compared, are those that are counted, billed or found by trying all."""

import pytest
import torch

from actmem.config import Layout, ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.plan.planned_models import planned_model_of
from actmem.plan.search import static_rows
from actmem.rows import total
from actmem_course.judge.cases import lab1_count_bytes as cases1
from actmem_course.judge.cases.lab5_pipeline import BUDGETS
from actmem_course.judge.cases.lab8_plan import STATE_PARTS
from actmem_course.judge.kept import kept
from actmem_course.judge.solutions import lab1_count_bytes as lab1
from actmem_course.judge.solutions.lab5_pipeline import how_many_fit
from actmem_course.judge.solutions.lab8_plan import rank_state_bytes
from actmem_course.judge.virtual import VirtualRanks
from actmem_course.judge.workbench import Bench


def test_a_rank_keeps_what_is_measured():
    for s, b, h, a, t, sp, recompute in cases1.RANKS:
        counted = sum(cases1.measured(ModelShape(s, b, h, a), t, sp, recompute).values())
        assert lab1.rank_bytes(s, b, h, a, t, sp, recompute) == counted


def test_the_gated_mlp_keeps_what_is_measured():
    for s, b, h, f in cases1.GATED:
        weights = [torch.randn(size, dtype=torch.bfloat16) for size in ((f, h), (f, h), (h, f))]
        x = torch.randn(s, b, h, dtype=torch.bfloat16)
        (found,) = VirtualRanks(1, alone=True).run(lambda rank: kept(Bench({}, rank), lab1.gated_mlp, x, weights))
        assert lab1.gated_mlp_bytes(s, b, h, f) == found.bytes


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
        parameters = total(static_rows(model, Layout(1, t, zero_stage=0), 0)["weights"]) // 2
        parts = static_rows(model, Layout(dp, t, zero_stage=stage), 0)
        billed = {part: total(parts[part]) for part in STATE_PARTS}
        assert rank_state_bytes(parameters, dp, stage) == billed
