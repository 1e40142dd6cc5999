"""Emulated pipeline ranks of the paper's models: the right layers, the right moment, the exact bytes."""

import pytest

from actmem.formulas.first_stage import (
    EMBEDDING_TERM,
    eq5,
    eq6,
    first_stage_bytes,
    in_flight,
    interleave_factor,
    section43_extras,
)
from actmem.models import PAPER_MODELS
from actmem.rows import by_term, compare, extra_rows, total
from actmem_course.bench.reproduce.paper_stage import (
    STAGE_CONFIGURATIONS,
    PaperStage,
    measure_paper_stage,
    schedule,
)
from tests.tiers import covering

BOTH = "tensor+sequence+selective"


def ranks(name):
    return range(PAPER_MODELS[name].parallel.pipeline_parallel_size)


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_ranks_hold_every_layer_once(name):
    layers = [layer for rank in ranks(name) for chunk in PaperStage(name, BOTH, rank).chunks() for layer in chunk]
    assert sorted(layers) == list(range(PAPER_MODELS[name].shape.num_layers))


@pytest.mark.parametrize(("name", "configuration"), covering(PAPER_MODELS, STAGE_CONFIGURATIONS, of=1))
def test_the_chosen_moment_is_the_fullest(name, configuration):
    """Counted from the actions alone: as many chunk-microbatches as the formula says, on every rank."""
    for rank in ranks(name):
        stage = PaperStage(name, configuration, rank)
        actions = stage.actions()
        assert actions == schedule(name)[rank][: len(actions)] and actions[-1].kind == "F"
        held = [a for a in actions if a.kind == "F"]
        for action in actions:
            if action.kind == "B":
                held = [a for a in held if (a.chunk, a.microbatch) != (action.chunk, action.microbatch)]
        assert len(held) == in_flight(stage.parallel, rank, stage.num_microbatches)


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
    equation = eq5 if configuration == "tensor+sequence" else eq6
    layers = equation(shape, t) * interleave_factor(p, m)
    assert layers == first_stage_bytes(shape, parallel, stage.configuration.recompute, stage.num_microbatches)
    masks = terms[EMBEDDING_TERM]
    assert masks == p * shape.seq_length * shape.micro_batch_size * shape.hidden_size // t * (1 if m == 1 else 2)
    # Section 4.3 counts p masks, also where interleaving holds 2p.
    printed = layers + section43_extras(shape, t, p)
    assert sum(terms.values()) == printed + (0 if m == 1 else masks // 2)


@pytest.mark.parametrize(
    "stage",
    [PaperStage("22B", "full"), PaperStage("1T", "tensor", 63), PaperStage("175B", "tensor+selective", 7)],
    ids=str,
)
def test_other_ranks_and_configurations(stage):
    measured = measure_paper_stage(stage)
    assert compare(stage.rows() + stage.extra_rows(), measured).exact
    assert total(measured) > total(stage.rows()) > 0
