"""Chapter 8's figures, and the planner's wall, show the formulas' numbers."""

import pytest

from actmem.config import Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LLAMA_MODELS, TINY_LLAMA
from actmem.models import PAPER_MODELS
from actmem.plan.actions import PricedLayer, frontier, recompute_choices
from actmem.plan.planned_models import planned_model_of
from actmem.plan.step_time import GIBIBYTE, Cluster
from actmem.rows import total
from actmem_course.show.style import size_text
from actmem_course.show.today import first_aid, frontier_figure, kept_today, llama_bars, plan_of_request, plan_wall


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("model", LLAMA_MODELS)
def test_bars_add_up_to_what_a_layer_keeps(model, t):
    shape, parallel = LLAMA_MODELS[model], Parallel(t, True)
    drawing = kept_today(shape, parallel)
    for i, mode in enumerate(("none", "selective", "elementwise", "full")):
        kept = total(llama_rows(shape, parallel, mode))
        assert sum(trace["x"][i] for trace in drawing.traces) * drawing.axis.unit == pytest.approx(kept, rel=1e-12)
        assert drawing.layout["annotations"][i]["text"].strip() == size_text(kept) and size_text(kept) in drawing.alt
    assert 0 < sum(trace["x"][0] for trace in drawing.traces) < drawing.axis.end


@pytest.mark.parametrize("recompute", ["none", "elementwise"])
@pytest.mark.parametrize("shape", [TINY_LLAMA, *LLAMA_MODELS.values()])
def test_a_llamas_bars_are_its_rows(shape, recompute):
    drawing, rows = llama_bars(shape, recompute), llama_rows(shape, recompute=recompute)
    once = 2 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    together, *each = (trace["x"][0] for trace in drawing.traces)
    assert sum(each) * once == pytest.approx(total(rows)) and together * once == pytest.approx(total(rows))
    assert [trace["name"] for trace in drawing.traces] == ["together", *(row.term for row in rows)]
    assert f"{total(rows):,} bytes" in drawing.alt
    assert max(trace["x"][0] for trace in drawing.traces) <= drawing.axis.end


@pytest.mark.parametrize("model", PAPER_MODELS)
def test_the_frontier_and_the_named_modes(model):
    shape = PAPER_MODELS[model].shape
    a, b, h, s = shape.letters()
    every, line, offload, compress, named = frontier_figure(shape).traces
    layer = PricedLayer.of(shape)
    assert len(every["x"]) == 32
    assert len(line["x"]) == len(frontier(recompute_choices(layer), lambda choice: choice.flops))
    for x, y, mode in zip(named["x"], named["y"], named["text"]):
        assert x == float(100 * layer_overhead(shape, mode))
        assert y * s * b * h == pytest.approx(total(layer_rows(shape, recompute=mode)), rel=1e-12)
    # Elementwise and full lie on the line: nothing keeps less for as few FLOPs.
    on_line = {(round(x, 9), round(y, 9)) for x, y in zip(line["x"], line["y"])}
    assert {(round(named["x"][i], 9), round(named["y"][i], 9)) for i in (2, 3)} <= on_line
    for before, after in ((line, offload), (offload, compress)):  # more ways keep no more in no more time
        for x, y in zip(before["x"], before["y"]):
            assert any(other <= x + 1e-9 and kept <= y for other, kept in zip(after["x"], after["y"]))
    for trace in (line, offload, compress):
        assert trace["y"] == sorted(trace["y"], reverse=True) and trace["x"] == sorted(trace["x"])


@pytest.mark.parametrize(("name", "memory"), [("llama3-70b", 80), ("175b", 40)])
def test_the_plans_bars_are_the_bills(name, memory):
    bars = [trace for trace in plan_wall(name, memory, gpus=(16, 64)).traces if trace["type"] == "bar"]
    for place, gpus in enumerate((16, 64)):
        bill, _, _ = plan_of_request(planned_model_of(name), Cluster(gpus, memory * GIBIBYTE), 512)
        positive = sum(max(size, 0) for size in bill.by_part().values())
        assert sum(trace["x"][place] for trace in bars) * GIBIBYTE == pytest.approx(positive)


def test_nothing_fits_is_said():
    drawing = plan_wall("175b", 40, gpus=(16,))
    assert "fits on none of them" in drawing.layout["title"]["text"] and "nothing fits; nearest" in drawing.alt


def test_first_aid_begins_with_what_costs_least_and_says_how_much_is_missing():
    """The order that chapter 10's list gives in words; full recomputation costs more time than all before it together."""
    (bars,) = first_aid("llama3-70b", 80).traces
    shares = [float(name.replace("<br>", " ").rsplit(": ", 1)[1].removesuffix("% time")) for name in bars["y"]]
    first = [name.replace("<br>", " ").split(":")[0] for name in bars["y"]]
    assert first[0] == "sequence parallelism" and shares[0] < 0
    assert first[1:3] == ["one sequence a microbatch", "what needs no product again (elementwise)"]
    full = shares[first.index("everything again (full)")]
    assert full > sum(share for share in shares[1:] if share < full)
    assert "too much" in first_aid("llama3-70b", 80).layout["title"]["text"]
    assert "to spare" in first_aid("llama3-8b", 80).layout["title"]["text"]
