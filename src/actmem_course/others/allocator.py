"""A model of torch's caching allocator on one stream, without a GPU: which block does each tensor get?

``torch.cuda.max_memory_allocated`` adds up *blocks*, and a block can be larger than its tensor. The rules are those of
c10/cuda/CUDACachingAllocator.cpp (torch 2.8):

- Sizes are rounded up to a multiple of 512 B.
- Blocks up to 1 MiB come from segments of 2 MiB, blocks up to 10 MiB from segments of 20 MiB. A larger block gets its
  own segment, rounded up to 2 MiB.
- A tensor takes the smallest free block that fits; of equally large ones, the one with the lowest address.
- A large block is split only if more than 1 MiB is left over (``should_split``). Otherwise the rest counts as
  allocated: up to 1 MiB for a tensor, which no formula of tensors predicts.
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
    """Round ``num_bytes`` up to a multiple of ``unit`` bytes, and to at least one unit."""
    return max(unit, -(-num_bytes // unit) * unit)


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment that is free or holds one tensor.

    Attributes:
        address: The block's address, in bytes.
        size: The block's size, in bytes.
        in_use: Whether the block holds a tensor.
        name: Name of the tensor that the block holds, or of the last tensor that it held; "" if it never held one.
    """

    address: int
    size: int
    in_use: bool = False
    name: str = ""


@dataclass(eq=False)
class Segment:
    """Memory that the allocator requested from the GPU at once, divided into blocks.

    Attributes:
        small: Whether the segment is for tensors of up to 1 MiB.
        blocks: The segment's blocks in the order of their addresses, free blocks and those in use.
    """

    small: bool
    blocks: list[MemoryBlock]

    @property
    def address(self) -> int:
        """The address of the segment's first block, in bytes."""
        return self.blocks[0].address

    def join_free(self) -> None:
        """Merge free blocks that are neighbours into one block."""
        joined = self.blocks[:1]
        for block in self.blocks[1:]:
            if joined[-1].in_use or block.in_use:
                joined.append(block)
            else:
                joined[-1].size += block.size
        self.blocks = joined


@dataclass
class CachingAllocator:
    """The allocator: ``take`` a block for a tensor, and ``free`` it.

    It never returns a segment to the GPU. torch does so only on ``empty_cache`` or when it would run out of memory, and
    even then the bytes of ``stuck`` stay reserved.

    Attributes:
        expandable: Whether PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set: there is then one segment for small
            and one for large tensors, and each grows.
        allocated: Bytes of the blocks in use now.
        peak: The most bytes of blocks in use at once so far.
        segments: The segments requested from the GPU so far.
    """

    expandable: bool = False
    allocated: int = 0
    peak: int = 0
    segments: list[Segment] = field(default_factory=list)
    _end: int = 0

    def take(self, name: str, num_bytes: int) -> MemoryBlock:
        """Find or make a free block for a tensor of ``num_bytes`` bytes, mark it as in use, and return it.

        Args:
            name: the tensor's name, which the block keeps; it can be "".
            num_bytes: the tensor's bytes.
        """
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
        """Mark blocks that ``take`` returned as free, and merge them with free neighbours."""
        for block in blocks:
            block.in_use = False
            self.allocated -= block.size
            next(segment for segment in self.segments if block in segment.blocks).join_free()

    @property
    def reserved(self) -> int:
        """Bytes of all segments: what ``torch.cuda.memory_reserved`` shows."""
        return sum(block.size for segment in self.segments for block in segment.blocks)

    @property
    def stuck(self) -> int:
        """Free bytes that torch can't return to the GPU.

        torch can return a segment that holds no tensor. Of an expandable segment it can also return the pages that lie
        entirely in a free block (``release_blocks``), but not a page that a free block shares with a tensor.
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
