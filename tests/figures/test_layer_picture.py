"""The course's one picture of a layer: its boxes are as wide as the formulas' bytes, its arrows carry theirs."""

import re
from itertools import product

import pytest

from actmem.config import TINY, ConfigError, Parallel, model_shape
from actmem.formulas.activations import gathered_input_bytes, layer_bytes, layer_rows
from actmem.formulas.communication import layer_collectives, wire_bytes
from actmem.formulas.stages import in_flight, layers_per_chunk
from actmem.recipes import PAPER_LAYER, RECOMPUTE_MODES
from actmem.rows import on_host, total
from actmem_course.figures import layer_picture as picture
from actmem_course.figures.pipeline_picture import pipeline_moments, pipeline_picture
from actmem_course.figures.sketch import MOST_ALIKE
from actmem_course.figures.style import FILLS
from actmem_course.figures.terms import KINDS
from actmem_course.figures.units import size_text
from actmem_more.llama_shape import LLAMA_MODELS
from actmem_more.llama_terms import context_collectives, forced_routed_tokens, llama_collectives, llama_rows
from tests.drawings import assert_valid

SMALL, LLAMA, LATENT = model_shape("22B"), LLAMA_MODELS["llama3-8b"], LLAMA_MODELS["deepseek-v3"]
ON_HOST = {"GeLU input": "offload", "4h→h input": "offload", "softmax output": "recompute"}


def drawn_bytes(drawing, fills):
    """Widths of all boxes in these fills: outlines of five points, with a gap after each."""
    colours = {fill.colour for fill in fills}
    outlines = [trace for trace in drawing.traces if trace.get("fillcolor") in colours]
    return sum(trace["x"][i + 1] - trace["x"][i] for trace in outlines for i in range(0, len(trace["x"]), 6))


def saved(drawing):
    return drawn_bytes(drawing, [FILLS[kind] for kind in KINDS])


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(4), Parallel(4, True), Parallel(8, True)], ids=str)
def test_boxes_of_all_ranks_are_as_wide_as_table_2(parallel, mode):
    drawing = picture.layer_picture(SMALL, parallel, mode)
    each = layer_bytes(SMALL, parallel, mode)
    assert saved(drawing) == pytest.approx(min(parallel.tensor_parallel_size, MOST_ALIKE) * each)
    assert f"each rank holds {each:,} bytes" in drawing.alt
    assert_valid(drawing)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(4), Parallel(8, True)], ids=str)
@pytest.mark.parametrize(
    ("phase", "shape", "mode"),
    [
        *product(("forward", "backward"), (SMALL, LLAMA, LLAMA_MODELS["mixtral-8x7b"]), ["none"]),
        *product(["recompute"], [SMALL], ("selective", "full", "paper-full")),
    ],
)
def test_arrows_carry_the_bytes_of_the_layers_collectives(parallel, phase, shape, mode):
    moves = picture.transfers(shape, parallel, phase, mode)
    collectives = layer_collectives(shape, parallel, mode) if shape == SMALL else llama_collectives(shape, parallel)
    assert sum(move.sent_bytes for move in moves) == wire_bytes(each for each in collectives if each.phase == phase)
    drawing = picture.layer_picture(shape, parallel, mode, collectives=phase)
    assert all(f"{move.sent_bytes:,} bytes sent" in drawing.alt for move in moves)
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
    assert f"each rank holds {stays:,} bytes" in drawing.alt
    assert_valid(drawing)


@pytest.mark.parametrize("stored", [1, 7, len(layer_rows(TINY))])
def test_the_forward_pass_stores_one_tensor_after_the_other(stored):
    drawing = picture.layer_picture(TINY, stored=stored)
    assert saved(drawing) == pytest.approx(total(layer_rows(TINY)[:stored]))
    assert_valid(drawing)


def test_more_ranks_than_fit_are_counted_and_not_drawn():
    drawing = picture.layer_picture(SMALL, Parallel(64))
    assert saved(drawing) == pytest.approx(MOST_ALIKE * layer_bytes(SMALL, Parallel(64)))
    assert "Each of 64 ranks" in drawing.layout["title"]["text"]


# Recomputation in backward, and moments in between.


def test_a_moment_shows_what_is_in_memory_and_frames_what_is_there_again():
    rows = {row.term: row.bytes for row in layer_rows(SMALL)}
    there = ["Q", "K", "softmax output"]
    drawing = picture.layer_picture(SMALL, recompute="selective", in_memory=there)
    assert saved(drawing) == pytest.approx(sum(rows[term] for term in there))
    (frame,) = [trace for trace in drawing.traces if trace.get("line", {}).get("width") == 4]
    assert max(x for x in frame["x"] if x is not None) == rows["softmax output"]
    assert_valid(drawing)


def test_what_no_gradient_reads_is_not_saved():
    without = "gate and up input"
    drawing = picture.layer_picture(LLAMA, not_saved=[without])
    assert saved(drawing) == pytest.approx(sum(row.bytes for row in llama_rows(LLAMA) if row.term != without))
    assert re.search(f"{without} [\\d,]+ bytes, not saved", drawing.alt)


# Today's layers.


@pytest.mark.parametrize("name", LLAMA_MODELS)
@pytest.mark.parametrize("mode", ["none", "elementwise", "full"])
def test_todays_layers_are_as_wide_as_their_formulas(name, mode):
    for parallel in (Parallel(), Parallel(4), Parallel(4, True)):
        drawing = picture.layer_picture(LLAMA_MODELS[name], parallel, mode)
        each = total(llama_rows(LLAMA_MODELS[name], parallel, mode))
        assert saved(drawing) == pytest.approx(parallel.tensor_parallel_size * each)
        assert_valid(drawing)


@pytest.mark.parametrize("kind", picture.CONTEXT_KINDS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ranks_that_share_a_sequence_send_the_formulas_bytes(kind, phase):
    parallel, formula_kind = Parallel(context_parallel_size=4), "ulysses" if kind == "ulysses" else "gather"
    moves = picture.transfers(LLAMA, parallel, phase, context_kind=kind)
    collectives = context_collectives(LLAMA, parallel, formula_kind)
    assert sum(move.sent_bytes for move in moves) == wire_bytes(each for each in collectives if each.phase == phase)
    drawing = picture.layer_picture(LLAMA, parallel, collectives=phase, context_kind=kind)
    assert saved(drawing) == pytest.approx(4 * total(llama_rows(LLAMA, parallel, context_kind=formula_kind)))


def test_more_ranks_than_heads_hold_copies_of_them():
    parallel, shape = Parallel(16), LLAMA  # 8 heads of keys and values
    drawing = picture.layer_picture(shape, parallel)
    copied = sum(row.bytes for row in llama_rows(shape, parallel) if row.split_by < 16)
    assert f"{size_text(copied)} of it is a copy" in drawing.layout["title"]["text"]
    labels = [text for trace in drawing.traces if trace.get("mode") == "text" for text in trace["text"]]
    assert sum("2sbd" in text for text in labels) == 2 and "<i>each head on 2 ranks</i>" in labels


def test_a_one_sided_router_fills_one_rank():
    shape, parallel = LLAMA_MODELS["mixtral-8x7b"], Parallel(4, True)
    tokens = [forced_routed_tokens(shape, parallel, "one-sided", rank) for rank in range(4)]
    each = [total(llama_rows(shape, parallel, routed_tokens=number)) for number in tokens]
    drawing = picture.layer_picture(shape, parallel, collectives="forward", routed_tokens=tokens)
    assert saved(drawing) == pytest.approx(sum(each))
    assert f"each rank holds {max(each):,} bytes" in drawing.alt
    own = 2 * shape.hidden_size * tokens[0] // 4  # bytes of a rank's pairs of a token and an expert
    assert f"dispatch: all-to-all after dispatched weights, {own:,} bytes sent by the busiest" in drawing.alt
    assert f"combine: all-to-all after down input, {3 * own:,} bytes sent by the busiest" in drawing.alt


# Microbatches in flight.


@pytest.mark.by_day(2)
@pytest.mark.parametrize("parallel", [Parallel(8, True, 4), Parallel(8, True, 4, 2), Parallel(2, True, 8)], ids=str)
def test_ranks_hold_the_formulas_bytes_at_their_peaks(parallel):
    drawings = [pipeline_picture(SMALL, parallel, 8, moment) for moment in pipeline_moments(parallel, 8)]
    layers = in_flight(parallel, 0, 8) * layers_per_chunk(SMALL, parallel)
    assert max(map(held_by_rank_0, drawings)) == layers * layer_bytes(SMALL, parallel)
    assert held_by_rank_0(drawings[-1]) == 0
    for drawing in drawings:
        assert_valid(drawing)


def held_by_rank_0(drawing):
    return int(re.search(r"rank 0 holds \d+ microbatches, ([\d,]+) bytes", drawing.alt)[1].replace(",", ""))


def test_the_plain_form_saves_the_gathered_inputs_and_gathers_nothing_again():
    parallel = Parallel(4, True)
    drawing = picture.layer_picture(SMALL, parallel, keeps_gathered=True)
    assert saved(drawing) == pytest.approx(4 * (layer_bytes(SMALL, parallel) + gathered_input_bytes(SMALL, 4)))
    plain = picture.layer_picture(SMALL, parallel, collectives="backward", keeps_gathered=True)
    assert drawn_bytes(plain, [FILLS["transient"]]) == 0


@pytest.mark.parametrize(
    ("draw", "line"),
    [
        (lambda: picture.layer_picture(TINY, stored=0), "stored: must be from 1 to "),
        (lambda: picture.layer_picture(TINY, stored=len(layer_rows(TINY)) + 1), "stored: must be from 1 to "),
        (lambda: picture.layer_picture(SMALL, Parallel(context_parallel_size=2)), "context_parallel_size: must be 1"),
        (
            lambda: picture.layer_picture(LLAMA, Parallel(2, context_parallel_size=2)),
            "context_parallel_size: must be 1",
        ),
        (lambda: picture.layer_picture(LATENT, Parallel(4, True), collectives="forward"), "collectives: no formula"),
        (
            lambda: pipeline_picture(SMALL, Parallel(1, False, 16), 16, 0),
            "pipeline_parallel_size: the picture has room",
        ),
    ],
)
def test_what_has_no_picture_is_refused(draw, line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        draw()
