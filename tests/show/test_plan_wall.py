"""The wall of plans: its bars are the bills' bytes, and it says when nothing fits."""

import plotly.graph_objects as go
import pytest

from actmem.plan.hardware import GIBIBYTE, Cluster
from actmem.plan.known_models import planned_model_of
from actmem_course.show.today import plan_of_request, plan_wall


@pytest.mark.parametrize(("name", "memory"), [("llama3-70b", 80), ("175b", 40)])
def test_bars_are_the_bills(name, memory):
    drawing = plan_wall(name, memory, gpus=(16, 64))
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])
    bars = [trace for trace in drawing.traces if trace["type"] == "bar"]
    for place, gpus in enumerate((16, 64)):
        bill, _, _ = plan_of_request(planned_model_of(name), Cluster(gpus, memory * GIBIBYTE), 512)
        positive = sum(max(size, 0) for size in bill.by_part().values())
        assert sum(trace["x"][place] for trace in bars) * GIBIBYTE == pytest.approx(positive)
    assert all(len(line) <= 75 for line in drawing.layout["title"]["text"].split("<br>"))
    assert "\n" not in drawing.alt and drawing.alt.endswith(".")


def test_nothing_fits_is_said():
    drawing = plan_wall("175b", 40, gpus=(16,))
    assert "fits on none of them" in drawing.layout["title"]["text"] and "nothing fits; nearest" in drawing.alt
