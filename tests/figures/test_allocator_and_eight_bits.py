"""Chapter 14: linears in 8 bits save from a number of tokens on, and the map of memory shows every block."""

import pytest

from actmem.rows import total
from actmem_course.figures.ch14_allocator_and_eight_bits import (
    EVENTS_PLAYED,
    ORDERS,
    SEGMENTS,
    memory_after,
    memory_map,
)
from actmem_course.others.allocator import MEBIBYTE, CachingAllocator
from actmem_course.predicted.eight_bits import break_even_tokens, eight_bit_rows
from actmem_more.llama_shape import llama_shape
from actmem_more.llama_terms import llama_rows

LLAMA = llama_shape("llama3-8b")


def at(tokens):
    return LLAMA.with_sizes(seq_length=tokens)


def test_linears_in_8_bits_save_from_the_break_even_on():
    tokens = break_even_tokens(LLAMA)
    for more, saves in ((-8, False), (8, True)):
        rows = eight_bit_rows(at(tokens + more))
        assert (total(rows) < total(llama_rows(at(tokens + more)))) is saves
    one, both = (total(eight_bit_rows(at(8192), n)) for n in (1, 2))
    assert both - one == 8192 * (3 * LLAMA.hidden_size + LLAMA.ffn_hidden_size)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_a_map_shows_every_block_of_every_segment(segments, order):
    for moment in EVENTS_PLAYED:
        drawing, (memory, _) = memory_map(moment, segments, order), memory_after(moment, segments, order)
        boxes = [int(text) for text in drawing.traces[-1]["text"]]
        assert sum(boxes) == memory.reserved // MEBIBYTE >= memory.allocated // MEBIBYTE
        title = drawing.layout["title"]["text"]
        assert f"{memory.allocated // MEBIBYTE} MiB allocated, {memory.reserved // MEBIBYTE} MiB reserved" in title


def test_free_pieces_beside_states_are_what_torch_cannot_give_back():
    """34 MiB are free at the fullest moment: a segment of 12, which goes back, and 22 in pieces."""
    memory, _ = memory_after(18, SEGMENTS[0], "shortest first")
    free = sum(block.size for first in memory.segments for block in first.blocks if not block.in_use)
    assert (free, memory.stuck) == (34 * MEBIBYTE, 22 * MEBIBYTE)


def test_of_expandable_segments_whole_free_pages_go_back():
    """A page is 20 MiB: free are 2 to 50 of 60 MiB, and with them the page from 20 to 40; then 2 to 60, and two pages."""
    memory = CachingAllocator(expandable=True)
    for name, size in (("first", 2), ("between", 48), ("last", 10)):
        memory.take(name, size * MEBIBYTE)
    _, between, last = memory.segments[0].blocks
    assert memory.stuck == 0
    memory.free(between)
    assert memory.stuck == 28 * MEBIBYTE
    memory.free(last)
    assert memory.stuck == 18 * MEBIBYTE
    memory.free(memory.segments[0].blocks[0])
    assert memory.stuck == 0


def test_the_longest_batch_first_and_expandable_segments_reserve_less():
    reserved = {
        (order, segments): memory_after(EVENTS_PLAYED[-1], segments, order)[0].reserved
        for order in ORDERS
        for segments in SEGMENTS
    }
    own, grown = SEGMENTS
    assert reserved["longest first", own] < reserved["shortest first", own]
    assert all(reserved[order, grown] < reserved[order, own] for order in ORDERS)
