"""The course's one picture of a layer: its boxes are as wide as the formulas' bytes, its arrows carry theirs."""

import pytest
from hypothesis import given

from actmem.config import TINY, ConfigError, Parallel, model_shape
from actmem.formulas.activations import eq1, layer_bytes, layer_rows
from actmem.formulas.communication import layer_exchanges, wire_bytes
from actmem.recipes import PAPER_LAYER, RECOMPUTE_MODES
from actmem.rows import on_host, total
from actmem_course.figures import layer_picture as picture
from actmem_course.figures.style import FILLS
from actmem_course.figures.terms import KINDS
from tests.drawings import assert_valid
from tests.shapes import shapes

SMALL = model_shape("22B")
ON_HOST = {"GeLU input": "offload", "4h→h input": "offload", "softmax output": "recompute"}


def drawn_bytes(drawing, fills):
    """Widths of all boxes in these fills: outlines of five points, with a gap after each."""
    colours = {fill.colour for fill in fills}
    outlines = [trace for trace in drawing.traces if trace.get("fillcolor") in colours]
    return sum(trace["x"][i + 1] - trace["x"][i] for trace in outlines for i in range(0, len(trace["x"]), 6))


def saved(drawing):
    return drawn_bytes(drawing, [FILLS[kind] for kind in KINDS])


@given(shapes())
def test_boxes_are_as_wide_as_equation_1(shape):
    assert saved(picture.layer_picture(shape)) == pytest.approx(eq1(shape))


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(4), Parallel(4, True), Parallel(8, True)], ids=str)
def test_boxes_of_all_ranks_are_as_wide_as_table_2(parallel, mode):
    drawing = picture.layer_picture(SMALL, parallel, mode)
    each = layer_bytes(SMALL, parallel, mode)
    assert saved(drawing) == pytest.approx(parallel.tensor_parallel_size * each)
    assert f"each rank saves {each:,} bytes" in drawing.alt
    assert_valid(drawing)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(4), Parallel(8, True)], ids=str)
def test_arrows_carry_the_bytes_of_the_layers_collectives(parallel, phase):
    moves = picture.paper_transfers(SMALL, parallel, phase)
    of_phase = [exchange for exchange in layer_exchanges(SMALL, parallel) if exchange.phase == phase]
    assert wire_bytes(move.exchange for move in moves) == wire_bytes(of_phase)
    drawing = picture.layer_picture(SMALL, parallel, collectives=phase)
    assert all(f"{move.exchange.wire_bytes:,} bytes sent" in drawing.alt for move in moves)
    assert_valid(drawing)


def test_backward_gathers_the_two_sharded_inputs_again():
    drawing, t = picture.layer_picture(SMALL, Parallel(4, True), collectives="backward"), 4
    whole = {row.term: row.bytes for row in layer_rows(SMALL)}
    missing = [size - size // t for term, size in whole.items() if term in ("QKV projection input", "h→4h input")]
    assert drawn_bytes(drawing, [FILLS["transient"]]) == pytest.approx(t * sum(missing))


def test_what_is_offloaded_stands_on_the_host():
    drawing = picture.layer_picture(SMALL, recompute=ON_HOST)
    stays, moved = total(layer_rows(SMALL, recompute=ON_HOST)), total(on_host(layer_rows(SMALL), PAPER_LAYER, ON_HOST))
    assert saved(drawing) == pytest.approx(stays + moved)
    assert f"each rank saves {stays:,} bytes" in drawing.alt
    assert_valid(drawing)


@pytest.mark.parametrize("stored", [1, 7, 15])
def test_the_forward_pass_stores_one_tensor_after_the_other(stored):
    drawing = picture.layer_picture(TINY, stored=stored)
    assert saved(drawing) == pytest.approx(total(layer_rows(TINY)[:stored]))
    assert_valid(drawing)


@pytest.mark.parametrize("stored", [0, 16])
def test_other_moments_are_refused(stored):
    with pytest.raises(ConfigError, match="stored: must be from 1 to 15"):
        picture.layer_picture(TINY, stored=stored)


def test_more_ranks_than_fit_are_counted_and_not_drawn():
    drawing = picture.layer_picture(SMALL, Parallel(64))
    assert saved(drawing) == pytest.approx(picture.MOST_RANKS * layer_bytes(SMALL, Parallel(64)))
    assert "Each of 64 ranks" in drawing.layout["title"]["text"]
