"""torch's caching allocator on one stream, without a GPU: which block each tensor gets, and what it counts.

``torch.cuda.max_memory_allocated`` adds up *blocks*, and a block can be larger than its tensor.  The rules
are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.8): sizes go up to a multiple of 512 B; up to 1 MiB
come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a segment of their own,
rounded up to 2 MiB; the smallest free block that fits is taken (of equals the lowest address); and a large
block is split only if more than 1 MiB is left over (``should_split``).  What is left unsplit is counted as
allocated: up to 1 MiB a tensor that no formula of tensors shows.
"""

from __future__ import annotations

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
    in_use: bool = False
    name: str = ""


@dataclass(eq=False)
class Segment:
    """What the GPU gave at once: blocks in their order.  small: of tensors up to 1 MiB."""

    small: bool
    blocks: list[MemoryBlock]

    @property
    def address(self) -> int:
        return self.blocks[0].address

    def join_free(self) -> None:
        """Make one block of free neighbours."""
        joined = self.blocks[:1]
        for block in self.blocks[1:]:
            if joined[-1].in_use or block.in_use:
                joined.append(block)
            else:
                joined[-1].size += block.size
        self.blocks = joined


def blocks_of(segment: Segment) -> list[MemoryBlock]:
    """All blocks of a segment in their order."""
    return segment.blocks


@dataclass
class CachingAllocator:
    """Blocks taken and given back; ``expandable``: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.

    allocated, peak: bytes of blocks in use, now and at most.
    segments: an expandable one grows instead of having a second beside it.  None is given
    back to the GPU: torch does that only when it would run out of memory, or on ``empty_cache``, which both leave
    ``stuck`` there.
    """

    expandable: bool = False
    allocated: int = 0
    peak: int = 0
    segments: list[Segment] = field(default_factory=list)
    _end: int = 0

    def take(self, name: str, num_bytes: int) -> MemoryBlock:
        """A block for a tensor of ``num_bytes``."""
        size = rounded(num_bytes)
        small = size <= _SMALL
        own = (segment for segment in self.segments if segment.small == small)
        places = ((segment, block) for segment in own for block in segment.blocks)
        fitting = [(segment, block) for segment, block in places if not block.in_use and block.size >= size]
        fitting.sort(key=lambda place: (place[1].size, place[1].address))
        segment, block = fitting[0] if fitting else self._more(size, small)
        rest = block.size - size
        if rest >= _ROUND if small or self.expandable else rest > _SMALL:
            segment.blocks.insert(segment.blocks.index(block) + 1, MemoryBlock(block.address + size, rest))
            block.size = size
        block.in_use, block.name = True, name
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, *blocks: MemoryBlock) -> None:
        """Give blocks back; a free neighbour becomes part of the block."""
        for block in blocks:
            block.in_use = False
            self.allocated -= block.size
            next(segment for segment in self.segments if block in segment.blocks).join_free()

    @property
    def reserved(self) -> int:
        """Bytes of all segments: what the GPU has given."""
        return sum(block.size for segment in self.segments for block in segment.blocks)

    @property
    def stuck(self) -> int:
        """Free bytes that torch can't give back to the GPU.

        It returns a segment that holds no tensor, and each page of an expandable one that lies whole in a free block
        (``release_blocks``): what is left there are the pages that a free block shares with a tensor.
        """
        left = 0
        for segment in self.segments:
            free = [block for block in segment.blocks if not block.in_use]
            if self.expandable or len(free) < len(segment.blocks):
                left += sum(block.size for block in free)
            if self.expandable:
                left -= sum(_whole_pages(block, segment) for block in free)
        return left

    def _more(self, size: int, small: bool) -> tuple[Segment, MemoryBlock]:
        """A free block of a new segment, or of an expandable one that has grown."""
        shared = small or size < _LARGE_MINIMUM or self.expandable
        unit = _PAGES[small] if shared else _ROUND_LARGE
        for segment in self.segments:
            if self.expandable and segment.small == small:
                last = segment.blocks[-1]  # what is free there is the beginning of what is wanted
                pages = rounded(size - (0 if last.in_use else last.size), unit)
                segment.blocks.append(MemoryBlock(last.address + last.size, pages))
                segment.join_free()
                return segment, segment.blocks[-1]
        segment = Segment(small, [MemoryBlock(self._end, rounded(size, unit))])
        self.segments.append(segment)
        self._end += _APART if self.expandable else rounded(size, unit) + _ROUND_LARGE
        return segment, segment.blocks[-1]


def _whole_pages(block: MemoryBlock, segment: Segment) -> int:
    """Bytes of the pages of an expandable segment that lie in a block."""
    page, at = _PAGES[segment.small], block.address - segment.address
    return max(0, (at + block.size) // page - -(-at // page)) * page
