"""Figure 1: every segment is a formula's number, and the title counts right."""

from dataclasses import replace

import plotly.graph_objects as go
import pytest

from actmem.formulas.stage_terms import bytes_by_rank
from actmem.formulas.states import ADAM, parameter_counts
from actmem.models import PAPER_MODELS
from actmem_course.others.paper import A100_BYTES
from actmem_course.show.memory_wall import BASELINE_METHOD, METHODS, gpu_bytes, memory_wall


@pytest.mark.parametrize("method", METHODS)
def test_the_drawing_is_plotly_and_its_words_are_in_line(method):
    drawing = memory_wall(method)
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])
    assert all(len(line) <= 75 for line in drawing.layout["title"]["text"].split("<br>"))
    assert "\n" not in drawing.alt and drawing.alt.endswith(".")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_segments_are_the_fullest_stages_bytes(name, method):
    model, row = PAPER_MODELS[name], METHODS[method]
    parallel = replace(model.parallel, sequence_parallel=row.sequence_parallel)
    by_rank = bytes_by_rank(model.shape, parallel, row.recompute)
    count = sum(parameter_counts(model.shape, parallel).values())
    each = {state.term: state.bytes_per_parameter for state in ADAM["float32 gradients"]}
    assert gpu_bytes(model, method) == {
        "parameters": each["parameters"] * count,
        "gradients and optimizer": (sum(each.values()) - each["parameters"]) * count,
        "activations": by_rank[0],
    }
    assert by_rank[0] == max(by_rank), "the first stage is the one drawn because it holds most"


@pytest.mark.parametrize("method", METHODS)
def test_bars_end_where_the_baseline_ends(method):
    bars = [trace for trace in memory_wall(method).traces if trace["type"] == "bar"]
    for position, (name, model) in enumerate(PAPER_MODELS.items()):
        assert all(trace["y"][position] == name for trace in bars)
        baseline = sum(gpu_bytes(model, BASELINE_METHOD).values())
        assert sum(trace["x"][position] for trace in bars) * 2**30 == pytest.approx(baseline)


def test_the_title_says_what_fits():
    assert "none of the four models fits in 80 GiB" in memory_wall().layout["title"]["text"]
    for method in METHODS:
        fit = sum(sum(gpu_bytes(model, method).values()) <= A100_BYTES for model in PAPER_MODELS.values())
        assert ("all four models fit" in memory_wall(method).layout["title"]["text"]) == (fit == 4)


def test_only_a_method_frees_anything():
    assert "freed by the method" not in [trace["name"] for trace in memory_wall().traces]
    assert "freed by the method" in [trace["name"] for trace in memory_wall("full").traces]
