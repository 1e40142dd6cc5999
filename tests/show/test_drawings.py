"""Every drawing is valid plotly, and what it shows are the formulas' numbers."""

import plotly.graph_objects as go
import pytest
from hypothesis import given

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import crossover_seq_length, eq1, layer_extra_rows, layer_rows
from actmem.models import PAPER_MODELS, TINY, model_shape
from actmem.rows import total
from actmem_course.show.layer import layer_bars
from actmem_course.show.memory_wall import LENGTHS, crossover_lines
from actmem_course.show.style import axis_unit
from tests.shapes import shapes

GPT3 = model_shape("175B")
DRAWINGS = {
    "layer": layer_bars(layer_rows(GPT3), GPT3),
    "layer with extras": layer_bars(layer_rows(TINY) + layer_extra_rows(TINY), TINY),
    "one rank of many": layer_bars(layer_rows(GPT3, Parallel(8, True), "selective"), GPT3),
    "full recomputation": layer_bars(layer_rows(GPT3, recompute="full"), GPT3),
    "crossover": crossover_lines(GPT3),
}


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_plotly_knows_every_property(drawing):
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])


def test_plotly_would_refuse_a_property_that_it_does_not_know():
    with pytest.raises(ValueError):
        go.Figure(data=[{"type": "bar", "colour": "red"}])


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_title_fits_and_the_words_are_one_line(drawing):
    for line in drawing.layout["title"]["text"].split("<br>"):
        assert len(line) <= 75, "at 700 pixels more is cut"
    assert "\n" not in drawing.alt and drawing.alt.endswith(".")


def segments(drawing):
    return [trace for trace in drawing.traces if trace["x"] != [None]]


@given(shapes())
def test_segments_add_up_to_equation_1(shape):
    drawing = layer_bars(layer_rows(shape), shape)
    largest = max(
        sum(t["x"][0] for t in segments(drawing) if t["y"] == [block]) for block in ("layer norms", "attention", "MLP")
    )
    unit = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}[drawing.layout["xaxis"]["title"]["text"].split()[-1]]
    assert sum(trace["x"][0] * unit for trace in segments(drawing)) == pytest.approx(eq1(shape))
    assert largest <= drawing.layout["xaxis"]["range"][1] * (1 + 1e-9)
    assert f"{eq1(shape):,} bytes" in drawing.alt


def test_hover_says_the_exact_bytes_and_the_reason():
    rows = layer_rows(GPT3)
    for row, trace in zip(rows, segments(DRAWINGS["layer"]), strict=True):
        assert trace["name"] == row.term and f"{row.bytes:,} B" in trace["hovertemplate"]


def test_the_legend_has_each_kind_once():
    shown = [trace["name"] for trace in DRAWINGS["layer"].traces if trace.get("showlegend", True)]
    assert len(shown) == len(set(shown)) == 6
    assert "extra" in [trace["name"] for trace in DRAWINGS["layer with extras"].traces if trace.get("showlegend", True)]


def test_the_unit_suits_a_small_layer():
    assert "MiB" in DRAWINGS["layer with extras"].layout["xaxis"]["title"]["text"]
    assert axis_unit(total(layer_rows(GPT3)))[1] == "GiB"


def test_the_two_lines_cross_where_the_formula_says():
    rest, core = (dict(zip(trace["x"], trace["y"])) for trace in DRAWINGS["crossover"].traces[:2])
    cross = crossover_seq_length(GPT3.hidden_size, GPT3.num_attention_heads)
    assert [core[s] > rest[s] for s in LENGTHS] == [s > cross for s in LENGTHS]
    assert rest[2048] * 2**30 == 34 * 2048 * 12288 and core[2048] * 2**30 == 5 * 96 * 2048**2


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_crossovers_title_names_the_larger_part(name):
    shape = model_shape(name)
    for s, first in ((128, "all the rest holds"), (16384, "the attention core holds")):
        assert first in crossover_lines(shape.with_sizes(seq_length=s)).layout["title"]["text"]


def test_a_fingerprint_changes_with_the_drawing_only():
    again = layer_bars(layer_rows(GPT3), GPT3)
    assert again.fingerprint() == DRAWINGS["layer"].fingerprint()
    other = GPT3.with_sizes(seq_length=2049)
    assert layer_bars(layer_rows(other), other).fingerprint() != again.fingerprint()


def test_one_token_and_one_head_can_be_drawn():
    shape = ModelShape(1, 1, 1, 1)
    assert "39 bytes" in layer_bars(layer_rows(shape), shape).alt


def test_a_page_written_by_plotly_leaves_the_next_drawing_alone(tmp_path):
    before = crossover_lines(GPT3).fingerprint()
    spec = crossover_lines(GPT3).spec()
    go.Figure(spec["data"], spec["layout"]).write_html(tmp_path / "page.html", config=spec["config"])
    assert crossover_lines(GPT3).fingerprint() == before
