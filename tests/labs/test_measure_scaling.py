"""measure_scaling as a user starts it: FLOPs and bytes exact at every point; slopes of known power laws."""

import json

import plotly.graph_objects as go
import pytest

from actmem.config import ConfigError, ModelShape
from actmem_course.bench.measure_scaling import AXES, FACTORS, axis_settings, slope, slopes
from actmem_course.results import ScalingPoint
from actmem_course.show.measured import scaling_figure, slope_finding
from actmem_course.show.tables import scaling_table
from tests.labs.in_process import shown_in_80_columns
from tests.show.test_speed import printed

SCRIPT = "measure_scaling.py"
SIZES = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 8]


def test_every_axis_is_exact(tmp_path):
    path, page = tmp_path / "scaling.json", tmp_path / "scaling.html"
    shown_in_80_columns(SCRIPT, *SIZES, "--rounds", 1, "--json", path, "--html", page)
    document = json.loads(path.read_text())
    assert [point["axis"] for point in document["points"]] == [axis for axis in AXES for _ in FACTORS]
    for point in document["points"]:
        assert (
            point["measured_flops"] == point["predicted_flops"] and point["measured_bytes"] == point["predicted_bytes"]
        )
    by_axis = {one["axis"]: one for one in document["slopes"]}
    # FLOPs: 24sbh² + 4bs²h is between linear and quadratic in s; t shares it evenly, n repeats it.
    assert 1 < by_axis["seq_length"]["flops"] < 2
    assert by_axis["tensor_parallel_size"]["flops"] == pytest.approx(-1) and by_axis["num_microbatches"][
        "flops"
    ] == pytest.approx(1)
    held = [point["measured_bytes"] for point in document["points"] if point["axis"] == "num_microbatches"]
    assert [size // held[0] for size in held] == [1, 2, 4, 4]
    assert "The slope of time" in page.read_text()


def law(axis, exponent):
    return [
        ScalingPoint(axis, n, 0.002 * n**exponent, (0.002 * n**exponent,) * 2, n**2, n**2, n, n) for n in (1, 2, 4, 8)
    ]


def test_slopes_of_known_laws():
    assert slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    found = slopes(law("seq_length", 1.5))
    assert (found.seconds, found.spread, found.flops, found.bytes) == pytest.approx((1.5, 0, 2, 1))
    uncertain = [
        ScalingPoint(**{**vars(point), "quartiles": (point.seconds / 2, point.seconds * 2)})
        for point in law("seq_length", 1.5)
    ]
    assert slopes(uncertain).spread > 0.5


def test_figure_and_table_hold_every_point():
    points = [point for axis in AXES for point in law(axis, 1.5)]
    found = [slopes([point for point in points if point.axis == axis]) for axis in AXES]
    drawing = scaling_figure(points, found, "somewhere")
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])
    seconds = [trace for trace in drawing.traces if trace["name"].startswith("seconds")]
    assert [trace["y"] for trace in seconds] == [[n**1.5 for n in (1, 2, 4, 8)]] * 4
    assert "within 0.50" in slope_finding(found) and drawing.alt.count("time 1.50, FLOPs 2.00, bytes 1.00") == 4
    assert "…" not in printed(scaling_table(points, found, "title"))


def test_places():
    base = ModelShape(16, 1, 32, 8)
    assert [place.shape.seq_length for place in axis_settings("seq_length", base).values()] == [8, 16, 32, 64]
    assert [place.tensor_parallel_size for place in axis_settings("tensor_parallel_size", base).values()] == [
        1,
        2,
        4,
        8,
    ]
    with pytest.raises(ConfigError, match="seq_length: 15 must be even"):
        axis_settings("seq_length", base.with_sizes(seq_length=15))
