"""Emulated pipeline ranks of the paper's models: the right layers, the right moment, the exact bytes."""

import pytest

from actmem.config import PAPER_MODELS, ModelShape
from actmem.formulas import stages
from actmem.formulas.flops import hardware_flops
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import by_term, compare, extra_rows
from actmem_course.lab_tools.paper_models import (
    PaperStage,
    count_flops,
    count_parameters,
    measure_paper_stage,
)
from tests.tiers import covering

BOTH = "tensor+sequence+selective"


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("name", "configuration"), covering(PAPER_MODELS, ["tensor+sequence", BOTH], of=1))
def test_first_stage_is_equation_5_or_6_to_the_byte(name, configuration):
    """Real layers, all of them, every microbatch in flight: measured equals predicted, term by term."""
    stage = PaperStage(name, configuration)
    shape, parallel = stage.model.shape, stage.parallel
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    measured = measure_paper_stage(stage)
    assert compare(stage.rows() + stage.extra_rows(), measured).exact

    terms = by_term(measured)
    for row in extra_rows(stage.extra_rows()):
        del terms[row.term]
    equation = stages.eq5 if configuration == "tensor+sequence" else stages.eq6
    layers = equation(shape, t) * stages.interleave_factor(p, m)
    masks = terms[stages.EMBEDDING_TERM]
    assert masks == p * shape.seq_length * shape.micro_batch_size * shape.hidden_size // t * (1 if m == 1 else 2)
    # Section 4.3 counts p masks, also where interleaving holds 2p.
    printed = layers + stages.section43_extras(shape, t, p)
    assert sum(terms.values()) == printed + (0 if m == 1 else masks // 2)


SHAPE = ModelShape(16, 2, 48, 8, num_layers=3, vocab_size=40)


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_every_mode_on_a_small_model(recompute):
    assert sum(count_flops(SHAPE, recompute).values()) == hardware_flops(SHAPE, 2, recompute)


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_parameters(name):
    model = PAPER_MODELS[name]
    on_a_rank = sum(parameter_counts(model.shape, model.parallel).values())
    assert count_parameters(name) == (num_parameters(model.shape), on_a_rank)
