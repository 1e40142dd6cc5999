"""The layer as bars, as a drawing and as a game: every tensor once, and the numbers are the formulas'."""

import plotly.graph_objects as go
import pytest
from hypothesis import given

from actmem.config import TINY, ConfigError, ModelShape, model_shape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, eq1, layer_extra_rows, layer_rows
from actmem.rows import LAYER_TERMS, total
from actmem_course.figures import ch02_counting_bytes as layer
from actmem_course.figures.units import axis_unit, size_text
from tests.shapes import shapes

GPT3 = model_shape("175B")
BARS = layer.layer_bars(layer_rows(GPT3), GPT3)
WITH_EXTRAS = layer.layer_bars(layer_rows(TINY) + layer_extra_rows(TINY), TINY)
EMPTY = dict.fromkeys(layer.keep_controls(), layer.NO_ANSWER)
RIGHT = dict(zip(layer.keep_controls(), map(layer.kept_by, layer.operations()), strict=True))


# Bars.


def segments(drawing):
    return [trace for trace in drawing.traces if trace["x"] != [None]]


@given(shapes())
def test_segments_add_up_to_equation_1(shape):
    drawing = layer.layer_bars(layer_rows(shape), shape)
    blocks = ("layer norms", "attention", "MLP")
    largest = max(sum(t["x"][0] for t in segments(drawing) if t["y"] == [block]) for block in blocks)
    assert sum(trace["x"][0] for trace in segments(drawing)) * drawing.axis.unit == pytest.approx(eq1(shape))
    assert largest <= drawing.layout["xaxis"]["range"][1] * (1 + 1e-9)
    assert f"{eq1(shape):,} bytes" in drawing.alt


def test_hover_says_the_exact_bytes():
    for row, trace in zip(layer_rows(GPT3), segments(BARS), strict=True):
        assert trace["name"] == row.term and f"{row.bytes:,} B" in trace["hovertemplate"]


def test_the_legend_has_each_kind_once():
    shown, more = ([t["name"] for t in drawn.traces if t.get("showlegend", True)] for drawn in (BARS, WITH_EXTRAS))
    assert len(shown) == len(set(shown)) == 6 and "extra" in more


def test_the_unit_suits_a_small_layer():
    assert "MiB" in WITH_EXTRAS.layout["xaxis"]["title"]["text"]
    assert axis_unit(total(layer_rows(GPT3)))[1] == "GiB"
    one = ModelShape(1, 1, 1, 1)
    assert "39 bytes" in layer.layer_bars(layer_rows(one), one).alt


def test_a_fingerprint_changes_with_the_drawing_only_whatever_plotly_does_with_it(tmp_path):
    spec = BARS.spec()
    go.Figure(spec["data"], spec["layout"]).write_html(tmp_path / "page.html", config=spec["config"])
    assert layer.layer_bars(layer_rows(GPT3), GPT3).fingerprint() == BARS.fingerprint()
    other = GPT3.with_sizes(seq_length=2049)
    assert layer.layer_bars(layer_rows(other), other).fingerprint() != BARS.fingerprint()


# The drawing, lit in the order of the forward pass.


def boxes(drawing):
    """The boxes: their middles, and what pointing at each says."""
    (trace,) = [trace for trace in drawing.traces if trace.get("mode") == "markers+text"]
    return dict(zip(trace["customdata"], zip(trace["x"], trace["y"])))


def names(drawing):
    """The words above the bars."""
    return drawing.traces[-1]["text"]


def widths(drawing):
    """The width of each tensor's bar, by the middle of its box: bars are drawn as outlines by fill."""
    outlines = [t for t in drawing.traces if t.get("fill") == "toself"]
    found = {}
    for about, (x, y) in boxes(drawing).items():
        for outline in outlines if "<b>" in about else ():
            for i in range(0, len(outline["x"]), 6):
                left, right = outline["x"][i], outline["x"][i + 1]
                if abs((left + right) / 2 - x) < 1e-9 and outline["y"][i] < y < outline["y"][i + 2]:
                    found[about] = right - left
    return found


@pytest.mark.parametrize("shape", [TINY, GPT3.with_sizes(seq_length=512)])
def test_bars_are_as_wide_as_their_bytes(shape):
    rows, drawn = layer_rows(shape), widths(layer.layer_drawing(layer_rows(shape), shape))
    by_term = {row.term: drawn[about] for row in rows for about in drawn if about.startswith(f"<b>{row.term}</b>")}
    assert len(by_term) == len(rows)
    for row in rows:
        assert by_term[row.term] / by_term[rows[0].term] == pytest.approx(row.bytes / rows[0].bytes)


def test_it_has_every_tensor_once_in_the_order_of_the_forward_pass():
    drawn = [term for _, terms in layer.LAYER_OPERATIONS for term in terms]
    assert len(drawn) == len(LAYER_TERMS)
    assert [term for term in drawn if term != "V"] == [term for term in LAYER_TERMS if term != "V"]


@pytest.mark.parametrize("step", [1, 7, 15])
def test_a_step_lights_the_tensors_up_to_it(step):
    rows = layer_rows(TINY)
    drawing = layer.layer_drawing(rows, TINY, step)
    assert all(any(about.startswith(f"<b>{row.term}</b>") for about in boxes(drawing)) for row in rows)
    assert sum("<b>" in text for text in names(drawing)) == step
    assert len({text.rpartition(" ")[2] for text in names(drawing) if "<b>" in text}) == 1, "one unit in one chart"
    assert f"{total(rows[:step]):,} of {total(rows):,} bytes" in drawing.alt


def test_what_is_made_again_never_lights_up():
    rows = layer_rows(GPT3, recompute="selective")
    drawing = layer.layer_drawing(rows, GPT3)
    assert {f"<b>{term}</b>: not kept, made again in backward" for term in CORE_ATTENTION_TERMS} <= set(boxes(drawing))
    assert sum("made again" in text for text in names(drawing)) == len(CORE_ATTENTION_TERMS)
    assert f"stored so far {total(rows):,}" in drawing.alt


@pytest.mark.parametrize("step", [0, 16])
def test_other_steps_are_refused(step):
    with pytest.raises(ConfigError, match="step: must be from 1 to 15"):
        layer.layer_drawing(layer_rows(GPT3), GPT3, step)


# The game of chapter 2: one right answer for each operation, and the right answers find every byte.


def test_every_tensor_belongs_to_one_operation():
    assert sorted(term for terms in layer.operations().values() for term in terms) == sorted(LAYER_TERMS)


def verdicts(drawing):
    return [note["text"].strip() for note in drawing.layout["annotations"] if note.get("xref") != "paper"]


@pytest.mark.parametrize("shape", [GPT3, TINY], ids=["175B", "tiny"])
def test_all_right_answers_find_equation_1(shape):
    drawing = layer.keep_game(shape, **RIGHT)
    drawn = sum(value for trace in drawing.traces for value in trace["x"] if value)
    assert round(drawn * axis_unit(eq1(shape))[0]) == eq1(shape), "the bars are the bytes"
    assert f"you have found all {size_text(eq1(shape))}" in drawing.layout["title"]["text"]


@pytest.mark.parametrize("name", RIGHT)
def test_one_answer_is_right_and_no_other_shows_bytes(name):
    for answer in layer.ANSWERS[1:]:
        drawing, right = layer.keep_game(GPT3, **{**EMPTY, name: answer}), answer == RIGHT[name]
        assert f"{int(right)} of {len(RIGHT)} right" in drawing.layout["title"]["text"]
        assert any("✗" in verdict for verdict in verdicts(drawing)) != right
        assert sum("iB" in verdict for verdict in verdicts(drawing)) == int(right and RIGHT[name] != "nothing")


def test_nothing_is_told_before_an_answer():
    drawing = layer.keep_game(GPT3, **EMPTY)
    assert set(verdicts(drawing)) == {layer.NO_ANSWER}
    assert not any(term in drawing.alt for term in LAYER_TERMS if " " in term)
