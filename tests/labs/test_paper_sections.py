"""Entries of every section: complete, exact where they should be, and wrong where a measurement is."""

import json

import pytest
from measure_paper import SECTIONS, measure_paper
from paper_steps import sections

from actmem.config import PAPER_MODELS
from actmem.formulas.activations import TABLE2, closed_form
from actmem.formulas.flops import hardware_flops
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.rows import Row
from actmem_course.lab_tools import paper_models

MODELS = tuple(PAPER_MODELS)


def measured_by_formula(change=lambda what, result: result):
    """In place of each measurement what it would give if it agreed, changed."""

    def parameters(name):
        model = PAPER_MODELS[name]
        counts = parameter_counts(model.shape, model.parallel)
        return change("parameters", (num_parameters(model.shape), sum(counts.values())))

    def iteration(name, recompute):
        flops = hardware_flops(PAPER_MODELS[name].shape, PAPER_MODELS[name].global_batch_size, recompute)
        return change("FLOPs", {"aten.mm": flops})

    def layer(name):
        sizes = [closed_form(c, PAPER_MODELS[name].shape, 8) for c in TABLE2]
        found = [{"predicted_bytes": n, "extra_bytes": 5, "measured_bytes": n + 5, "disagreement": ""} for n in sizes]
        return change("layer", found)

    return {
        "measure_paper_stage": lambda stage: change("stage", stage.rows() + stage.extra_rows()),
        "count_parameters": parameters,
        "count_iteration": iteration,
        "measure_layer": layer,
    }


def entries_by_formula(section, models=MODELS, **change):
    with pytest.MonkeyPatch.context() as patch:
        for name, function in measured_by_formula(**change).items():
            patch.setattr(sections if name == "measure_layer" else paper_models, name, function)
        return measure_paper([section], models)[section]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_model_every_number_exact_and_plain_in_json(section):
    entries = entries_by_formula(section)
    assert {e.section for e in entries} == {section}
    assert len({(e.model, e.quantity, e.unit, e.paper) for e in entries}) == len(entries)
    if section in ("table4", "figure9", "disagreements"):
        assert all(e.model == {"table4": "22B", "figure9": "530B"}.get(section, e.model) for e in entries)
    else:
        assert list(dict.fromkeys(e.model for e in entries)) == list(MODELS)
    assert all(e.exact is not False for e in entries)
    for entry, read in zip(entries, json.loads(json.dumps([entry.as_row() for entry in entries]))):
        assert read["quantity"] == entry.quantity
        assert all(value is None or isinstance(value, (str, int, float)) for value in read.values())


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("figure1", lambda what, result: [*result, Row("more", 1)] if what == "stage" else result),
        ("table2", lambda what, result: [*result[:5], {**result[5], "disagreement": "more"}]),
        ("table3", lambda what, result: (result[0], result[1] + 1)),
        ("figure7", lambda what, result: [Row(row.term + "?", row.bytes) for row in result]),
        ("table5", lambda what, result: {"aten.mm": result["aten.mm"] + 10**12}),
        ("flops", lambda what, result: {"aten.mm": result["aten.mm"] - 1}),
        ("figure9", lambda what, result: result[1:]),
    ],
)
def test_a_wrong_measurement_is_seen(section, change):
    wrong = [e for e in entries_by_formula(section, change=change) if e.exact is False]
    assert wrong and all(e.difference or e.disagreement for e in wrong)


def test_figure_9_has_a_row_for_every_rank():
    entries = entries_by_formula("figure9")
    assert [e.pipeline_rank for e in entries if e.quantity.startswith("rank")] == list(range(35))
    (saved,) = [e for e in entries if e.unit == "GiB"]
    assert float(saved.ours_formula) == pytest.approx(saved.paper * 139 / 35 / 8, rel=0.01)
    assert entries_by_formula("figure9", ["22B"]) == entries_by_formula("table4", ["1T"]) == []
    assert {e.model for e in entries_by_formula("figure9", ["175B", "1T"])} == {"175B", "1T"}
