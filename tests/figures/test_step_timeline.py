"""A step's memory over time: its areas add up to what was alive."""

import pytest
import torch
from torch import nn

from actmem.ledger.whole_step import step
from actmem_course.figures.step_timeline import step_timeline
from actmem_course.figures.units import axis_unit
from tests.drawings import assert_valid


def test_areas_add_up_to_what_is_alive_after_each_operation():
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)
    bill = step(model, x, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    drawing = step_timeline(bill, "a small model")
    assert_valid(drawing)
    unit, _ = axis_unit(bill.peak_bytes)
    sums = [
        unit * sum(sizes)
        for sizes in zip(*(trace["y"] for trace in drawing.traces if "stackgroup" in trace), strict=True)
    ]
    assert sums == pytest.approx(bill.curve)
    assert "optimizer states" not in [trace["name"] for trace in drawing.traces], "SGD has none"
    *phases, peak = drawing.layout["annotations"]
    assert [phase["text"] for phase in phases] == ["forward", "backward", "optimizer"]
    assert bill.curve[peak["x"]] == bill.peak_bytes
