"""The front door: what it draws are the sums of the rows, and switches do what the chapters say."""

import itertools

import plotly.graph_objects as go
import pytest

from actmem.models import PAPER_MODELS
from actmem_course.others.paper import A100_BYTES
from actmem_course.show.memory_wall import METHODS, PARTS_OF_GPU, front_door, gpu_bytes, one_gpu
from actmem_course.show.times import table4_bars

SWITCHES = list(itertools.product((False, True), repeat=4))
OF_METHOD = {
    "tensor": (True, False, False, False),
    "tensor+sequence": (True, True, False, False),
    "tensor+selective": (True, False, True, False),
    "tensor+sequence+selective": (True, True, True, False),
    "full": (True, False, False, True),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", PAPER_MODELS.values(), ids=PAPER_MODELS)
def test_switches_are_rows_of_table_2(model, method):
    assert one_gpu(model, *OF_METHOD[method]) == gpu_bytes(model, method)


@pytest.mark.parametrize("switches", SWITCHES)
def test_it_is_plotly_and_its_bars_are_the_bytes(switches):
    drawing = front_door("175B", *switches)
    go.Figure(data=drawing.spec()["data"], layout=drawing.spec()["layout"])
    assert all(len(line) <= 50 for line in drawing.layout["title"]["text"].split("<br>")), "at 390 pixels more is cut"
    assert "\n" not in drawing.alt and drawing.alt.endswith(".")
    for trace in drawing.traces[: len(PARTS_OF_GPU)]:
        for name, value in zip(trace["x"], trace["y"], strict=True):
            assert value * 2**30 == one_gpu(PAPER_MODELS[name], *switches)[trace["name"]]
    fits = sum(one_gpu(PAPER_MODELS["175B"], *switches).values()) <= A100_BYTES
    assert ("it fits" in drawing.layout["title"]["text"]) == fits


def test_with_both_methods_all_four_models_fit_and_with_none_of_them_no_model():
    both, alone = front_door("1T", True, True, True, False), front_door("1T", True, False, False, False)
    assert both.alt.count(", fits") == len(PAPER_MODELS) and alone.alt.count(", fits") == 0


def test_no_switch_adds_bytes():
    for model in PAPER_MODELS.values():
        for switches in SWITCHES:
            for number in range(4):
                more = tuple(on or place == number for place, on in enumerate(switches))
                assert sum(one_gpu(model, *more).values()) <= sum(one_gpu(model, *switches).values())


def test_the_bars_of_table_4_are_its_times():
    drawing = table4_bars()
    go.Figure(data=drawing.spec()["data"], layout=drawing.spec()["layout"])
    assert "39% slower" in drawing.layout["title"]["text"] and "4%" in drawing.layout["title"]["text"]
