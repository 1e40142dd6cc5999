"""Chapter 6's figures: valid plotly, every pass drawn once, and curves that are the formulas'."""

from itertools import accumulate

import pytest

from actmem.config import Parallel, model_shape
from actmem.formulas.activations import layer_bytes
from actmem.formulas.schedule import one_forward_one_backward
from actmem.formulas.stages import eq5, in_flight, layers_per_chunk
from actmem_course.figures import ch06_pipeline as schedules
from actmem_course.others.timeline import memory_curve, timeline

GPT3 = model_shape("175B")
CUT = Parallel(8, True)
SIZES = [(1, 1, 1), (2, 1, 3), (4, 1, 8), (8, 1, 24), (4, 3, 8), (8, 3, 8), (2, 4, 2)]


def chart(p, m, n):
    return schedules.pipeline_schedule(GPT3, schedules.with_pipeline(CUT, p, m), n)


def bars(drawing):
    return [trace for trace in drawing.traces if trace["type"] == "bar"]


def curves(drawing):
    """For each rank the (time, bytes) of its outline; what is drawn is the same, above the rank's foot."""
    (areas,) = [trace for trace in drawing.traces if trace.get("fill") == "toself"]
    found: dict[int, list[tuple[int, int]]] = {}
    feet: dict[int, float] = {}
    for x, y, (rank, size, _) in zip(areas["x"], areas["y"], areas["customdata"], strict=True):
        if x is not None:
            assert y == feet.setdefault(rank, y) + size
            found.setdefault(rank, []).append((x, size))
    assert sorted(feet.values(), reverse=True) == [feet[rank] for rank in sorted(feet)]
    return [found[rank] for rank in sorted(found)]


def tops(drawing):
    return [max(size for _, size in curve) for curve in curves(drawing)]


@pytest.mark.parametrize("p, m, n", SIZES)
def test_every_pass_is_drawn_once_and_none_overlap(p, m, n):
    drawn = [(y, base, base + x) for t in bars(chart(p, m, n)) for y, base, x in zip(t["y"], t["base"], t["x"])]
    assert len(drawn) == 2 * p * m * n
    for rank in range(p):
        own = sorted((start, end) for y, start, end in drawn if y == rank)
        assert all(end <= start for (_, end), (start, _) in zip(own, own[1:]))


@pytest.mark.parametrize("p, m, n", SIZES)
def test_the_first_curves_top_is_the_formula(p, m, n):
    parallel = schedules.with_pipeline(CUT, p, m)
    drawn = tops(chart(p, m, n))
    layers = in_flight(parallel, 0, n) * layers_per_chunk(GPT3, parallel)
    assert drawn[0] == layers * layer_bytes(GPT3, parallel)
    assert drawn == [drawn[0] * in_flight(parallel, rank, n) // in_flight(parallel, 0, n) for rank in range(p)]
    (dashed,) = [trace for trace in chart(p, m, n).traces if "equation 5" in trace["name"]]
    assert dashed["y"][0] == eq5(GPT3, 8) and dashed["x"].count(None) == p


def result(pipeline_rank, held, **more):
    """What a process measured."""
    own = {"pipeline_rank": pipeline_rank, "predicted_bytes": max(held), "extra_bytes": 0}
    return {"samples": [{"kept_bytes": kept} for kept in held], **own, **more}


@pytest.mark.parametrize("p, m, n", SIZES)
def test_what_is_measured_is_drawn_as_the_curve_that_is_predicted(p, m, n):
    """Each rank's bytes after each action, by the schedule alone, as a measurement gives them."""
    ranks = schedules.schedule_of(p, m, n)
    held = [list(accumulate(1000 if action.kind == "F" else -1000 for action in actions)) for actions in ranks]
    drawing = schedules.measured_schedule(ranks, [result(rank, kept) for rank, kept in enumerate(held)])
    end = max(span.end for span in timeline(ranks))
    for rank, curve in enumerate(curves(drawing)):
        predicted = memory_curve(timeline(ranks), rank, lambda action: 1000)
        assert curve == [(0, 0), *predicted, (end, 0), (end, 0), (0, 0)]
    assert "to the byte as predicted" in drawing.layout["title"]["text"]


def test_a_measurement_that_differs_is_not_called_as_predicted():
    drawing = schedules.measured_schedule(one_forward_one_backward(1, 1), [result(0, [1000, 0], predicted_bytes=999)])
    assert "to the byte not as predicted" in drawing.layout["title"]["text"]


def test_ranks_that_share_a_stage_have_curves_of_their_own_below_one_chart():
    ranks = one_forward_one_backward(2, 3)
    held = [[10 + rank + step for step, _ in enumerate(actions)] for rank, actions in enumerate(ranks)]
    results = [result(number // 2, held[number // 2], rank=number) for number in range(4)]
    drawing = schedules.measured_schedule(ranks, results)
    assert drawing.layout["yaxis"]["ticktext"] == ["rank 0", "rank 1"]
    assert len(drawing.layout["yaxis2"]["ticktext"]) == 4
    assert len(curves(drawing)) == 4 and curves(drawing)[0] == curves(drawing)[1] != curves(drawing)[2]
    assert "rank 0 held 15 B, rank 3 16 B" in drawing.alt
