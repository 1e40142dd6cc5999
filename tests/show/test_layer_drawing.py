"""The layer as a drawing: every tensor once, lit in the order of the forward pass, with the rows' bytes."""

import plotly.graph_objects as go
import pytest

from actmem.config import ConfigError
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.models import TINY, model_shape
from actmem.rows import LAYER_TERMS, total
from actmem_course.show.layer_drawing import ATTENTION_COLUMN, MLP_COLUMN, layer_drawing
from actmem_course.show.style import size_text

GPT3 = model_shape("175B")


def words(drawing):
    """The texts of all boxes, by what pointing at them says."""
    (trace,) = [trace for trace in drawing.traces if trace.get("mode") == "markers+text"]
    return {about: text for about, text in zip(trace["customdata"], trace["text"]) if text}


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
    texts = words(drawing)
    for number, row in enumerate(rows, start=1):
        (text,) = (text for about, text in texts.items() if about.startswith(f"<b>{row.term}</b>"))
        assert (size_text(row.bytes) in text) == (number <= step)
    assert f"{total(rows[:step]):,} of {total(rows):,} bytes" in drawing.alt
    assert all(len(line) <= 75 for line in drawing.layout["title"]["text"].split("<br>"))


def test_what_is_made_again_never_lights_up():
    drawing = layer_drawing(layer_rows(GPT3, recompute="selective"), GPT3)
    for term in CORE_ATTENTION_TERMS:
        assert "made again" in next(
            text for about, text in words(drawing).items() if about.startswith(f"<b>{term}</b>")
        )
    assert f"stored so far {total(layer_rows(GPT3, recompute='selective')):,}" in drawing.alt


@pytest.mark.parametrize("step", [0, 16])
def test_other_steps_are_refused(step):
    with pytest.raises(ConfigError, match="step: must be from 1 to 15"):
        layer_drawing(layer_rows(GPT3), GPT3, step)
