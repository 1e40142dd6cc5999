"""The game of chapter 2: every operation has one right answer, and the right answers find every byte."""

import plotly.graph_objects as go
import pytest

from actmem.formulas.activations import eq1
from actmem.models import TINY, model_shape
from actmem.rows import LAYER_TERMS
from actmem_course.show.layer import ANSWERS, NO_ANSWER, keep_controls, keep_game, kept_by, operations

GPT3 = model_shape("175B")
EMPTY = dict.fromkeys(keep_controls(), NO_ANSWER)
RIGHT = dict(zip(keep_controls(), map(kept_by, operations()), strict=True))


def test_every_tensor_belongs_to_one_operation():
    assert sorted(term for terms in operations().values() for term in terms) == sorted(LAYER_TERMS)


@pytest.mark.parametrize("shape", [GPT3, TINY], ids=["175B", "tiny"])
def test_all_right_answers_find_equation_1(shape):
    drawing = keep_game(shape, **RIGHT)
    assert f"{eq1(shape):,} of {eq1(shape):,} bytes" in drawing.alt
    in_unit = sum(sum(trace["x"]) for trace in drawing.traces)
    assert eq1(shape) in [round(in_unit * unit) for unit in (2**30, 2**20, 2**10)], "the bars are the bytes"


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("answer", ANSWERS[1:])
def test_one_answer_is_right_and_no_other_shows_bytes(name, answer):
    drawing = keep_game(GPT3, **{**EMPTY, name: answer})
    go.Figure(data=drawing.spec()["data"], layout=drawing.spec()["layout"])
    right = answer == RIGHT[name]
    assert f"{int(right)} of {len(RIGHT)} right, 1 answered" in drawing.alt
    assert (" ✗" in drawing.alt) != right
    assert all(len(line) <= 75 for line in drawing.layout["title"]["text"].split("<br>"))
    words = [text for trace in drawing.traces for text in trace.get("text", ())]
    assert sum("iB" in text for text in words) == int(right and RIGHT[name] != "nothing")


def test_nothing_is_told_before_an_answer():
    drawing = keep_game(GPT3, **EMPTY)
    assert f"0 of {eq1(GPT3):,} bytes found" in drawing.alt
    assert {text for trace in drawing.traces for text in trace["text"]} == {NO_ANSWER}
