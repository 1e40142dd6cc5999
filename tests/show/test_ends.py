"""Chapter 11's figures show the formulas' numbers."""

import pytest

from actmem.config import ConfigError, Parallel
from actmem.formulas.llama_terms import llama_products, llama_rows
from actmem.formulas.loss_peak import LOSSES, loss_peak_rows
from actmem.llama_shape import llama_shape
from actmem.rows import total
from actmem_course.show.ends import loss_bars, stage_work
from actmem_course.show.style import size_text

LLAMA = llama_shape("llama3-8b")


@pytest.mark.parametrize(("s", "t", "recompute"), [(131072, 1, "full"), (8192, 8, "none"), (4096, 2, "elementwise")])
def test_bars_of_the_loss_are_its_rows(s, t, recompute):
    shape = LLAMA.with_sizes(seq_length=s)
    drawing = loss_bars(shape, t, recompute)
    held = {}
    for trace in drawing.traces:
        for name, size in zip(trace["y"], trace["x"]):
            if name is not None:
                held[name] = held.get(name, 0) + size * drawing.axis.unit
    layers, *peaks = held.values()
    assert layers == pytest.approx(32 * total(llama_rows(shape, Parallel(t, t > 1), recompute)))
    wanted = [total(loss_peak_rows(loss, s, shape.hidden_size, shape.vocab_size, t)) for loss in LOSSES]
    assert peaks == pytest.approx(wanted)
    assert all(size_text(size) in drawing.alt for size in wanted)
    assert max(held.values()) / drawing.axis.unit < drawing.axis.end


def test_the_loss_of_a_long_sequence_is_larger_than_all_recomputed_layers():
    title = loss_bars(LLAMA.with_sizes(seq_length=131072), recompute="full").layout["title"]["text"]
    assert title.startswith("The loss takes 3.0 times what 32 layers keep,<br>a chunk at a time 0.1")


@pytest.mark.parametrize("p", [2, 8])
def test_stages_work_as_much_with_a_shared_vocabulary(p):
    work = {}
    for shared in (False, True):
        layers, output = stage_work(LLAMA, p, shared).traces
        work[shared] = [sum(pair) for pair in zip(layers["x"], output["x"])]
    s, h, v = LLAMA.seq_length, LLAMA.hidden_size, LLAMA.vocab_size
    assert sum(work[True]) == pytest.approx(sum(work[False]))
    assert sum(work[True]) == pytest.approx(32 + 2 * s * h * v / sum(llama_products(LLAMA).values()))
    assert len(set(work[True])) == 1 and set(work[False][:-1]) == {32 // p} < {work[False][-1], 32 // p}


def test_stages_that_do_not_divide_the_layers_are_refused():
    with pytest.raises(ConfigError, match="num_layers: 32 must be divisible by pipeline_parallel_size = 5"):
        stage_work(LLAMA, 5)
