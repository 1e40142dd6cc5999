"""torch's caching allocator on one stream, without a GPU: which block each tensor gets, and what it counts.

``torch.cuda.max_memory_allocated`` adds up *blocks*, and a block can be larger than its tensor. The rules are those of
c10/cuda/CUDACachingAllocator.cpp (torch 2.8). Sizes are rounded up to a multiple of 512 B. Blocks up to 1 MiB come from
segments of 2 MiB, blocks up to 10 MiB from segments of 20 MiB, larger ones from a segment of their own, rounded up to 2
MiB. The smallest free block that fits is taken, and of equal ones that with the lowest address. A large block is split
only if more than 1 MiB is left over (``should_split``). What is left unsplit is counted as allocated: up to 1 MiB a
tensor, which no formula of tensors shows.
"""

from dataclasses import dataclass, field

MEBIBYTE = 2**20
_ROUND, _SMALL = 512, MEBIBYTE
_LARGE_MINIMUM, _ROUND_LARGE = 10 * MEBIBYTE, 2 * MEBIBYTE
#: Bytes of a segment of small blocks (True), and of one of blocks below _LARGE_MINIMUM (False).  Expandable segments
#: grow by as much.
_PAGES = {True: 2 * MEBIBYTE, False: 20 * MEBIBYTE}
#: Distance between the addresses of two expandable segments.
_APART = 2**50


def rounded(num_bytes: int, unit: int = _ROUND) -> int:
    """Return ``num_bytes`` rounded up to whole units, at least one."""
    return max(unit, -(-num_bytes // unit) * unit)


@dataclass(eq=False)
class MemoryBlock:
    """A stretch of a segment that is free or holds one tensor.

    Attributes:
        address: In bytes.
        size: In bytes.
        in_use: Whether it holds a tensor.
        name: Of the tensor that it holds, or held last.
    """

    address: int
    size: int
    in_use: bool = False
    name: str = ""


@dataclass(eq=False)
class Segment:
    """Memory that the GPU gave at once, as blocks in order.

    Attributes:
        small: Whether it is for tensors of up to 1 MiB.
        blocks: Free ones and those in use.
    """

    small: bool
    blocks: list[MemoryBlock]

    @property
    def address(self) -> int:
        """Address of its first block."""
        return self.blocks[0].address

    def join_free(self) -> None:
        """Join free neighbours to one block."""
        joined = self.blocks[:1]
        for block in self.blocks[1:]:
            if joined[-1].in_use or block.in_use:
                joined.append(block)
            else:
                joined[-1].size += block.size
        self.blocks = joined


@dataclass
class CachingAllocator:
    """An allocator whose blocks are taken and given back.

    No segment is given back to the GPU: torch does that only when it would run out of memory, or on ``empty_cache``,
    and in both cases the bytes of ``stuck`` would stay.

    Attributes:
        expandable: Whether PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set. Then a segment grows, where
            otherwise a second one is made.
        allocated, peak: Bytes of blocks in use, now and at most.
        segments: What the GPU has given.
    """

    expandable: bool = False
    allocated: int = 0
    peak: int = 0
    segments: list[Segment] = field(default_factory=list)
    _end: int = 0

    def take(self, name: str, num_bytes: int) -> MemoryBlock:
        """Return a block for a tensor of ``num_bytes``."""
        size = rounded(num_bytes)
        small = size <= _SMALL
        usable = (segment for segment in self.segments if segment.small == small)
        places = ((segment, block) for segment in usable for block in segment.blocks)
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
        """Give blocks back; a free neighbour is joined to them."""
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

        torch returns each segment that holds no tensor, and of an expandable segment each page that lies inside a free
        block (``release_blocks``). In an expandable segment, what it can't return are the pages that a free block
        shares with a tensor.
        """
        stuck_bytes = 0
        for segment in self.segments:
            free = [block for block in segment.blocks if not block.in_use]
            if self.expandable or len(free) < len(segment.blocks):
                stuck_bytes += sum(block.size for block in free)
            if self.expandable:
                stuck_bytes -= sum(_whole_pages(block, segment) for block in free)
        return stuck_bytes

    def _more(self, size: int, small: bool) -> tuple[Segment, MemoryBlock]:
        """Return a new segment, or an expandable one that has grown, with its free block."""
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
    """Return the bytes of the pages of an expandable segment that lie inside a block."""
    page, at = _PAGES[segment.small], block.address - segment.address
    return max(0, (at + block.size) // page - -(-at // page)) * page
