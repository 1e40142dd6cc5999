"""torch's caching allocator on one stream, without a GPU: which block each tensor gets, and what it counts.

``torch.cuda.max_memory_allocated`` adds up *blocks*, and a block can be larger than its tensor.  The rules
are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.8): sizes go up to a multiple of 512 B; up to 1 MiB
come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a segment of their own,
rounded up to 2 MiB; the smallest free block that fits is taken (of equals the lowest address); and a large
block is split only if more than 1 MiB is left over (``should_split``).  What is left unsplit is counted as
allocated: up to 1 MiB a tensor that no formula of tensors shows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

MEBIBYTE = 2**20
_ROUND, _SMALL = 512, MEBIBYTE
_LARGE_MINIMUM, _ROUND_LARGE = 10 * MEBIBYTE, 2 * MEBIBYTE
#: Segments of small blocks, and of blocks below _LARGE_MINIMUM; pages by which expandable ones grow.
_PAGES = {True: 2 * MEBIBYTE, False: 20 * MEBIBYTE}
#: Between the addresses of two expandable segments.
_APART = 2**50


def rounded(num_bytes: int, unit: int = _ROUND) -> int:
    """``num_bytes`` rounded up to whole units, at least one."""
    return max(unit, -(-num_bytes // unit) * unit)


@dataclass(eq=False)
class MemoryBlock:
    """A stretch of a segment, free or holding one tensor, which is named."""

    address: int
    size: int
    small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    in_use: bool = False
    name: str = ""


def blocks_of(first: MemoryBlock) -> Iterator[MemoryBlock]:
    """All blocks of a segment in their order."""
    block: MemoryBlock | None = first
    while block:
        yield block
        block = block.after


@dataclass
class CachingAllocator:
    """Blocks taken and given back; ``expandable``: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.

    allocated, peak: bytes of blocks in use, now and at most.
    segments: the first block of each; an expandable one grows instead of having a second beside it.  None is given
    back to the GPU: torch does that only when it would run out of memory, or on ``empty_cache``, which both leave
    ``stuck`` there.
    """

    expandable: bool = False
    allocated: int = 0
    peak: int = 0
    segments: list[MemoryBlock] = field(default_factory=list)
    _free: dict[bool, list[tuple[int, int, MemoryBlock]]] = field(default_factory=lambda: {True: [], False: []})
    _end: int = 0

    def take(self, name: str, num_bytes: int) -> MemoryBlock:
        """A block for a tensor of ``num_bytes``."""
        size = rounded(num_bytes)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._more(size, small)
        rest = block.size - size
        if rest >= _ROUND if small or self.expandable else rest > _SMALL:
            beyond = MemoryBlock(block.address + size, rest, small, block, block.after)
            if block.after:
                block.after.before = beyond
            block.after, block.size = beyond, size
            self._insert(beyond)
        block.in_use, block.name = True, name
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, *blocks: MemoryBlock) -> None:
        """Give blocks back; a free neighbour becomes part of the block."""
        for block in blocks:
            if not block.in_use:
                raise ValueError(f"{block.name}: given back twice")
            block.in_use = False
            self.allocated -= block.size
            if block.before and not block.before.in_use:
                block = self._join(block.before, block)
            if block.after and not block.after.in_use:
                block = self._join(block, block.after)
            self._insert(block)

    @property
    def reserved(self) -> int:
        """Bytes of all segments: what the GPU has given."""
        return sum(block.size for first in self.segments for block in blocks_of(first))

    @property
    def stuck(self) -> int:
        """Free bytes that torch can't give back to the GPU.

        It returns a segment that holds no tensor, and each page of an expandable one that lies whole in a free block
        (``release_blocks``): what is left there are the pages that a free block shares with a tensor.
        """
        left = 0
        for first in self.segments:
            blocks = list(blocks_of(first))
            free = [block for block in blocks if not block.in_use]
            if self.expandable:
                left += sum(block.size - self._whole_pages(block, block.address - first.address) for block in free)
            elif len(free) < len(blocks):
                left += sum(block.size for block in free)
        return left

    @staticmethod
    def _whole_pages(block: MemoryBlock, at: int) -> int:
        """Bytes of the pages that lie in a block, which begins ``at`` so many bytes of its segment."""
        page = _PAGES[block.small]
        return max(0, (at + block.size) // page - -(-at // page)) * page

    def _more(self, size: int, small: bool) -> MemoryBlock:
        if self.expandable:
            for first in self.segments:
                if first.small == small:
                    return self._grown(first, size)
        shared = small or size < _LARGE_MINIMUM or self.expandable
        whole = rounded(size, _PAGES[small] if shared else _ROUND_LARGE)
        block = MemoryBlock(self._end, whole, small)
        self.segments.append(block)
        self._end += _APART if self.expandable else whole + _ROUND_LARGE
        return block

    def _grown(self, first: MemoryBlock, size: int) -> MemoryBlock:
        """Whole pages more at the end of an expandable segment.

        A free block there is the beginning of what is wanted.
        """
        *_, last = blocks_of(first)
        had = 0 if last.in_use else last.size
        pages = rounded(size - had, _PAGES[first.small])
        block = MemoryBlock(last.address + last.size, pages, first.small, last)
        last.after = block
        return self._join(last, block) if had else block

    def _join(self, left: MemoryBlock, right: MemoryBlock) -> MemoryBlock:
        free = self._free[left.small]
        for block in (left, right):
            place = bisect_left(free, (block.size, block.address))
            if place < len(free) and free[place][2] is block:
                free.pop(place)
        left.size += right.size
        left.after = right.after
        if right.after:
            right.after.before = left
        return left

    def _insert(self, block: MemoryBlock) -> None:
        insort(self._free[block.small], (block.size, block.address, block), key=lambda item: item[:2])
