"""The layer as a drawing: every tensor once, lit in the order of the forward pass, with the rows' bytes."""

import plotly.graph_objects as go
import pytest

from actmem.config import ConfigError
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.models import TINY, model_shape
from actmem.rows import LAYER_TERMS, total
from actmem_course.show.layer import ATTENTION_COLUMN, MLP_COLUMN, layer_drawing

GPT3 = model_shape("175B")


def boxes(drawing):
    """What pointing at each box says."""
    (trace,) = [trace for trace in drawing.traces if trace.get("mode") == "markers+text"]
    return trace["customdata"]


def names(drawing):
    """The words above the bars."""
    return drawing.traces[-1]["text"]


def widths(drawing):
    """The width of each tensor's bar, by the middle of its box: bars are drawn as outlines by fill."""
    (trace,) = [trace for trace in drawing.traces if trace.get("mode") == "markers+text"]
    middles = {about: (x, y) for about, x, y in zip(trace["customdata"], trace["x"], trace["y"]) if "<b>" in about}
    outlines = [t for t in drawing.traces if t.get("fill") == "toself"]
    found = {}
    for about, (x, y) in middles.items():
        for outline in outlines:
            for i in range(0, len(outline["x"]), 6):
                left, right = outline["x"][i], outline["x"][i + 1]
                if abs((left + right) / 2 - x) < 1e-9 and outline["y"][i] < y < outline["y"][i + 2]:
                    found[about] = right - left
    return found


@pytest.mark.parametrize("shape", [GPT3, TINY, GPT3.with_sizes(seq_length=512)])
def test_bars_are_as_wide_as_their_bytes(shape):
    drawn = widths(layer_drawing(layer_rows(shape), shape))
    rows = layer_rows(shape)
    by_term = {
        row.term: width for row in rows for about, width in drawn.items() if about.startswith(f"<b>{row.term}</b>")
    }
    assert len(by_term) == len(rows)
    for row in rows:
        assert by_term[row.term] / by_term[rows[0].term] == pytest.approx(row.bytes / rows[0].bytes)


def test_it_has_every_tensor_once_in_the_order_of_the_forward_pass():
    assert tuple(term for _, terms in ATTENTION_COLUMN + MLP_COLUMN for term in terms if term != "V") == tuple(
        term for term in LAYER_TERMS if term != "V"
    )
    assert sum(len(terms) for _, terms in ATTENTION_COLUMN + MLP_COLUMN) == len(LAYER_TERMS)


@pytest.mark.parametrize("step", range(1, 16))
def test_a_step_lights_the_tensors_up_to_it(step):
    rows = layer_rows(TINY)
    drawing = layer_drawing(rows, TINY, step)
    go.Figure(data=drawing.spec()["data"], layout=drawing.spec()["layout"])
    assert all(any(about.startswith(f"<b>{row.term}</b>") for about in boxes(drawing)) for row in rows)
    assert sum("<b>" in text for text in names(drawing)) == step
    units = {text.rpartition(" ")[2] for text in names(drawing) if "<b>" in text}
    assert len(units) == 1, "one unit in one chart"
    assert f"{total(rows[:step]):,} of {total(rows):,} bytes" in drawing.alt
    assert all(len(line) <= 75 for line in drawing.layout["title"]["text"].split("<br>"))


def test_what_is_made_again_never_lights_up():
    drawing = layer_drawing(layer_rows(GPT3, recompute="selective"), GPT3)
    for term in CORE_ATTENTION_TERMS:
        assert f"<b>{term}</b>: not kept, made again in backward" in boxes(drawing)
    assert sum("made again" in text for text in names(drawing)) == len(CORE_ATTENTION_TERMS)
    assert f"stored so far {total(layer_rows(GPT3, recompute='selective')):,}" in drawing.alt


@pytest.mark.parametrize("step", [0, 16])
def test_other_steps_are_refused(step):
    with pytest.raises(ConfigError, match="step: must be from 1 to 15"):
        layer_drawing(layer_rows(GPT3), GPT3, step)
