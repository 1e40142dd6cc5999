"""torch's caching allocator, modelled: which block a tensor gets, what is left unsplit, what comes back."""

import random

import pytest

from actmem_course.others.allocator import MEBIBYTE, CachingAllocator


@pytest.mark.parametrize(
    ("wanted", "counted", "counted_expandable"),
    [
        (1, 512, 512),
        (513, 1024, 1024),
        (MEBIBYTE, MEBIBYTE, MEBIBYTE),
        (4 * MEBIBYTE, 4 * MEBIBYTE, 4 * MEBIBYTE),
        # A segment of its own, 20 MiB: 1 MiB is left, too little to split.
        (19 * MEBIBYTE, 20 * MEBIBYTE, 19 * MEBIBYTE),
        (19 * MEBIBYTE - 512, 19 * MEBIBYTE - 512, 19 * MEBIBYTE - 512),
        (9 * MEBIBYTE + 512, 9 * MEBIBYTE + 512, 9 * MEBIBYTE + 512),
    ],
)
def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left(wanted, counted, counted_expandable):
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    plain.take("x", wanted)
    expandable.take("x", wanted)
    assert (plain.allocated, expandable.allocated) == (counted, counted_expandable)


def test_the_smallest_free_block_that_fits_is_taken_and_counted_whole():
    memory = CachingAllocator()
    blocks = [memory.take("x", size * MEBIBYTE) for size in (4, 5, 4, 3, 4)]  # one segment of 20 MiB
    memory.free(blocks[1], blocks[3])
    assert memory.take("y", 3 * MEBIBYTE + 512).size == 3 * MEBIBYTE + 512  # of the 5 MiB: more than 1 MiB is left
    held = memory.allocated
    assert memory.take("z", 2 * MEBIBYTE).size == 3 * MEBIBYTE  # 1 MiB left: counted as 3 MiB
    assert memory.allocated == held + 3 * MEBIBYTE


@pytest.mark.parametrize("expandable", [False, True])
def test_whatever_is_taken_and_given_back_blocks_never_overlap(expandable):
    chance = random.Random(5)
    memory, live = CachingAllocator(expandable), []
    for _ in range(2000):
        if live and chance.random() < 0.48:
            memory.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(memory.take("x", chance.choice([100, 70_000, MEBIBYTE, 3 * MEBIBYTE, 11 * MEBIBYTE + 5])))
        assert memory.allocated == sum(block.size for block in live) <= memory.reserved
    places = sorted((block.address, block.size) for block in live)
    assert all(a + size <= b for (a, size), (b, _) in zip(places, places[1:], strict=False))
    memory.free(*live)
    assert memory.allocated == 0
    assert len(memory.segments) == 2 or not expandable
    assert all(not block.in_use for first in memory.segments for block in first.blocks)


def test_what_is_freed_is_reserved_and_an_expandable_segment_grows_by_what_is_missing():
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for memory in (plain, expandable):
        for size in (30, 50):
            memory.free(memory.take("x", size * MEBIBYTE))
    assert plain.reserved == 80 * MEBIBYTE  # 50 don't fit in 30
    assert expandable.reserved == 60 * MEBIBYTE  # pages of 20 MiB: two, and one more
    assert [expandable.take("x", 45 * MEBIBYTE).size, expandable.reserved] == [45 * MEBIBYTE, 60 * MEBIBYTE]
