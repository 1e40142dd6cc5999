"""Chapter 12: its figures show the formulas' numbers; its allocator's segments add up; what linears in 8 bits keep."""

import pytest

from actmem.rows import total
from actmem_course.figures.ch12_long_sequences import (
    BATCH_ORDERS,
    EVENTS_PLAYED,
    SEGMENTS,
    eight_bit_bars,
    llama_layer_events,
    long_bars,
    memory_after,
    memory_map,
    play_layers,
    price,
    reserved_after,
)
from actmem_course.others.allocator import MEBIBYTE, CachingAllocator, blocks_of
from actmem_course.predicted.long_sequences import (
    TILE,
    break_even_tokens,
    eight_bit_rows,
    everything_kept,
    long_steps,
    mlp_peak_bytes,
)
from actmem_more.llama_shape import llama_shape
from actmem_more.llama_terms import llama_rows
from actmem_more.loss_peak import loss_peak_rows

LLAMA = llama_shape("llama3-8b")
H, F, V, L = LLAMA.hidden_size, LLAMA.ffn_hidden_size, LLAMA.vocab_size, 32


def at(tokens):
    return LLAMA.with_sizes(seq_length=tokens)


@pytest.mark.parametrize("tokens", [2**k for k in range(13, 21)])
def test_bars_are_the_steps_and_each_step_takes_less(tokens):
    drawing, held = long_bars(at(tokens)), {}
    for trace in drawing.traces:
        for name, size in zip(trace["y"], trace["x"]):
            held[name] = held.get(name, 0) + size * drawing.axis.unit
    steps = long_steps(at(tokens))
    assert list(held.values()) == pytest.approx([step.bytes for step in steps])
    sizes = [everything_kept(at(tokens)), *(step.bytes for step in steps)]
    assert sizes == sorted(sizes, reverse=True) and max(held.values()) / drawing.axis.unit < drawing.axis.end


def test_a_million_tokens_step_by_step():
    s = 2**20
    recomputed, chunks, host, tiles, shared = long_steps(at(s))
    x = 2 * s * H
    assert recomputed.bytes == 33 * x + total(loss_peak_rows("16 bits", s, H, V))
    attention = (
        2 * s * (H + H + 2 * H // 4 + H + H) + 4 * s * 32 + 8 * s
    )  # norm 1's output, Q, K and V, O, norm 2's input
    assert chunks.bytes == 33 * x + attention + s * (2 * H + 10 * F)
    assert host.bytes == chunks.bytes - 30 * x
    assert tiles.bytes == 3 * x + attention + 3 * x
    assert shared.bytes == tiles.bytes // 8  # of 131,072 tokens each; a tile is small beside them
    assert [price(step) for step in (recomputed, host)] == ["+33% FLOPs", "256 GiB out, and back"]


@pytest.mark.parametrize("tokens", [2**k for k in range(15, 21)])
def test_each_step_removes_what_is_largest_before_it(tokens):
    recomputed, chunks, host, tiles, _ = long_steps(at(tokens))
    largest = [max(step.parts, key=lambda part: step.parts[part]) for step in (recomputed, chunks, host)]
    assert largest == ["loss", "inputs of the layers", "MLP of one layer"]
    assert tiles.parts.get("MLP of one layer", 0) < host.parts["MLP of one layer"]


def test_an_mlp_in_tiles_of_all_tokens_is_no_cheaper():
    assert mlp_peak_bytes(TILE, H, F, TILE) >= mlp_peak_bytes(TILE, H, F)
    assert mlp_peak_bytes(10**6, H, F, TILE) == 10 * 10**6 * H


def test_linears_in_8_bits_save_from_the_break_even_on():
    tokens = break_even_tokens(LLAMA)
    for more, saves in ((-8, False), (8, True)):
        rows = eight_bit_rows(at(tokens + more))
        assert (total(rows) < total(llama_rows(at(tokens + more)))) is saves
    one, both = (total(eight_bit_rows(at(8192), n)) for n in (1, 2))
    assert both - one == 8192 * (3 * H + F)
    assert "272 MiB more" in eight_bit_bars(at(8192)).layout["title"]["text"]


@pytest.mark.parametrize("segments", SEGMENTS)
def test_a_map_shows_every_block_of_every_segment(segments):
    for moment in EVENTS_PLAYED:
        drawing = memory_map(moment, segments)
        said = drawing.layout["title"]["text"].split()
        allocated, reserved = int(said[-6].partition(">")[2]), int(said[-3])
        boxes = [int(text) for text in drawing.traces[-1]["text"]]
        assert sum(boxes) == reserved >= allocated
    assert (allocated, reserved) == (24, {SEGMENTS[0]: 118, SEGMENTS[1]: 100}[segments])


def test_free_pieces_beside_states_are_what_torch_cannot_give_back():
    """Chapter 12's words: 34 MiB are free at the fullest moment, a segment of 12 and 22 in pieces."""
    memory, _ = memory_after(18, SEGMENTS[0])
    segments = [list(blocks_of(first)) for first in memory.segments]
    free = [sum(block.size for block in blocks if not block.in_use) // MEBIBYTE for blocks in segments]
    held = [any(block.in_use for block in blocks) for blocks in segments]
    assert [size for size, in_use in zip(free, held) if not in_use] == [12]
    assert sum(size for size, in_use in zip(free, held) if in_use) == 22


@pytest.mark.parametrize("expandable", [False, True])
def test_only_lengths_that_grow_make_it_reserve_more_than_it_gives(expandable):
    for order, lengths in BATCH_ORDERS.items():
        peaks, reserved = reserved_after(lengths, expandable, layers=4)
        apart = reserved[-1] / peaks[-1]
        assert (apart > 1.2) is (order in ("as they come", "shortest first") and not expandable), (order, apart)


def test_a_tape_leaves_nothing_allocated_and_its_peak_is_what_its_layers_keep_and_one_at_work():
    memory, more = CachingAllocator(), CachingAllocator()
    play_layers(memory, llama_layer_events(1024), 2)
    play_layers(more, llama_layer_events(1024), 3)
    assert memory.allocated == more.allocated == 0
    assert more.peak - memory.peak == total(llama_rows(at(1024)))
