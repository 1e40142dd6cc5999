"""Charts of bars, lines and points: each is the formula's number, and what a slider leaves in place stays."""

import pytest

from actmem.config import PAPER_MODELS, ConfigError, Parallel, model_shape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, TABLE2, closed_form, eq1, layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.rows import total
from actmem_course.figures import ch09_your_model as planned
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.ch01_memory_wall import METHODS, gpu_bytes, memory_wall
from actmem_course.figures.ch05_recomputation import LADDER, memory_ladder, recompute_trade
from actmem_course.figures.ch07_time import table4_bars
from actmem_course.figures.ch10_the_loss import loss_bars
from actmem_course.figures.ch11_adapters import adapter_bars
from actmem_course.figures.controls import after
from actmem_course.others import paper
from actmem_course.predicted.adapters import PLACES, lora_rows
from actmem_more.llama_shape import LLAMA_MODELS
from actmem_more.llama_terms import llama_rows
from actmem_more.loss_peak import LOSSES, loss_peak_rows

LLAMA = LLAMA_MODELS["llama3-8b"]
GPT3 = model_shape("175B")
LONG, CUT = LLAMA.with_sizes(seq_length=131072), Parallel(8, True)


def bars_of(drawing):
    return [trace for trace in drawing.traces if trace["type"] == "bar"]


def sums(drawing):
    """What each bar adds up to, in the smallest unit of the axis."""
    found = {}
    for trace in bars_of(drawing):
        for name, value in zip(trace["y"], trace["x"], strict=True):
            if value is not None:
                found[name.replace("<br>", " ")] = found.get(name.replace("<br>", " "), 0) + value * drawing.axis.unit
    return found


def loss_totals(shape, t):
    return [total(loss_peak_rows(loss, shape.seq_length, shape.hidden_size, shape.vocab_size, t)) for loss in LOSSES]


#: A figure, and what its bars add up to, from the top.
SUMS = {
    "the loss": (loss_bars(LONG, 1, "full"), [32 * total(llama_rows(LONG, Parallel(), "full")), *loss_totals(LONG, 1)]),
    "the loss on 8 ranks": (loss_bars(LLAMA, 8), [32 * total(llama_rows(LLAMA, CUT)), *loss_totals(LLAMA, 8)]),
    "adapters": (
        adapter_bars(LLAMA, "all linears", 16, "float32", True),
        [32 * total(rows) for rows in (llama_rows(LLAMA), lora_rows(LLAMA, PLACES["all linears"], 16, "float32", True), llama_rows(LLAMA, recompute="elementwise"))],
    ),
    "the trade": (
        recompute_trade(GPT3),
        [100 * float(1 + layer_overhead(GPT3, mode)) for mode in ("none", "selective", "full")],
    ),
    "table 4": (table4_bars(), [row.forward_ms + row.backward_ms for row in paper.TABLE4.values()]),
    "table 4's first": (table4_bars(1), [paper.TABLE4["baseline, no recompute"].combined_ms]),
    "two codes": (planned.code_bars(LLAMA), [32 * LLAMA.seq_length * (8 * 14336 + 24 * 4096 + 8 + 4 * 32), 32 * total(llama_rows(LLAMA))]),
    **{
        f"the wall, {method}": (memory_wall(method), [sum(gpu_bytes(model).values()) for model in PAPER_MODELS.values()])
        for method in METHODS
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_bars_are_the_formulas_numbers(name):
    drawing, wanted = SUMS[name]
    found, order = sums(drawing), [line.replace("<br>", " ") for line in drawing.layout["yaxis"]["categoryarray"]]
    about = pytest.approx(wanted, rel=1e-9, abs=0.11 * ("table 4" in name))
    assert [found[bar] for bar in order if bar in found] == about
    assert max(found.values()) <= drawing.axis.end * drawing.axis.unit


def test_a_chart_of_more_parts_than_fills_is_refused():
    """zip() left out the parts beyond the fifth, and the words after the bars counted them."""
    with pytest.raises(ValueError, match="fills: 6 parts need as many, got 5"):
        bar_chart("Six", {str(part): {"a": 1.0} for part in range(6)}, "parts", "units")


# What a slider leaves in place: the axis.


def at(s):
    rows = layer_rows(GPT3.with_sizes(seq_length=s))
    core = sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)
    return bar_chart("", {"core": {"layer": core}, "rest": {"layer": total(rows) - core}}, "saved")


@pytest.mark.parametrize("before, now", [(2048, 1024), (1024, 2048), (8192, 256), (256, 8192)])
def test_bytes_stay_bytes_on_every_axis(before, now):
    drawn = after(at(before), at(now))
    drawn_bytes = sum(value * drawn.axis.unit for trace in bars_of(drawn) for value in trace["x"] if value)
    assert drawn_bytes == pytest.approx(eq1(GPT3.with_sizes(seq_length=now)))
    assert drawn.layout["xaxis"]["range"] == [0, drawn.axis.end]


def test_the_axis_stays_while_bars_fit_it_and_are_long_enough():
    first = at(2048)
    assert after(first, at(1024)).axis == first.axis != at(1024).axis
    assert after(first, at(8192)).axis == at(8192).axis  # too long
    assert after(at(8192), at(256)).axis == at(256).axis  # too short
    assert after(after(first, at(1792)), at(1024)).axis == first.axis, "as long as the reader goes on"


def test_the_ladder_is_table_2_in_percent_of_tensor_parallelism():
    shapes = [model.shape.with_sizes(seq_length=512) for model in PAPER_MODELS.values()]
    rows = {row.name: row for row in TABLE2 if row.tensor_parallel}
    assert list(LADDER) == list(rows)
    for trace, row in zip(bars_of(memory_ladder(512, 4)), rows.values(), strict=True):
        percent = [100 * closed_form(row, shape, 4) / closed_form(rows["tensor"], shape, 4) for shape in shapes]
        assert trace["x"] == pytest.approx(percent)
    with pytest.raises(ConfigError):  # ranks that can't share the models
        memory_ladder(2048, 3)
