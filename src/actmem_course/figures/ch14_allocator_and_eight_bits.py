"""Chapter 14: what 8-bit linears save for backward, and how much memory the allocator reserves but doesn't use."""

from actmem.rows import Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.diagrams import Box, boxes, diagram
from actmem_course.figures.marks import Drawing, legend
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_course.others.allocator import MEBIBYTE, CachingAllocator, MemoryBlock
from actmem_course.predicted.eight_bits import COPIES, NARROW, WIDE, break_even_tokens, eight_bit_rows
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows

#: What the bars show: a layer in 16 bits, or also one whose linears compute in 8 bits.
IN_16_BITS, IN_BOTH = SHOWN = "16 bits", "16 and 8 bits"


def eight_bit_bars(shape: LlamaShape, shown: str = IN_BOTH) -> Drawing:
    """Draw the bytes that a layer saves in 16 bits, and perhaps the bytes that it saves with 8-bit linears.

    There are two bars for 8-bit linears: their inputs are saved once, or also transposed.

    Args:
        shape: The layer's sizes.
        shown: Which bars to draw: IN_16_BITS for one bar, IN_BOTH for all three.
    """
    wide = total(llama_rows(shape))
    each = {"16 bits": [Row(WIDE, wide)]}
    says = f"in 16 bits a layer saves {size_text(wide)}"
    if shown == IN_BOTH:
        one = eight_bit_rows(shape)
        each |= {"8 bits, inputs in one orientation": one, "8 bits, inputs in both": eight_bit_rows(shape, 2)}
        more = total(one) - wide
        says = (
            f"with linears in 8 bits a layer saves {size_text(abs(more))} {'more' if more > 0 else 'less'}"
            f"<br>(break-even at {break_even_tokens(shape):,} tokens)"
        )
    return bar_chart(
        f"{shape.seq_length * shape.micro_batch_size:,} tokens: {says}",
        {
            part: {name: total(row for row in rows if row.term == part) for name, rows in each.items()}
            for part in (WIDE, NARROW, COPIES)
        },
        "saved by one layer of Llama 3 8B",
        fills=[FILLS[what] for what in ("activations", "input of a linear", "weights")],
        room_for=2 * wide,
    )


#: MiB of the tensors of three batches, and of each state that the first optimizer step makes.
_BATCHES, _STATE = ((10, 14, 18), (12, 16, 22), (14, 20, 26)), 8
ORDERS = {"shortest first": _BATCHES, "longest first": _BATCHES[::-1]}
#: The events, each with its batch: "take" makes the batch's next tensor, "free" frees its last one, "state" makes a
#: state of Adam's, which stays.
_STEPS = [(b, way) for b in range(3) for way in (*["take"] * 3, *["free"] * 3, *([] if b else ["state"] * 3))]
EVENTS_PLAYED = range(1, len(_STEPS) + 1)
_USES = {"this batch": "activations", "Adam's states": "optimizer states", "free, and reserved": "freed"}
_PLAIN, _EXPANDABLE = SEGMENTS = "plain", "expandable"


def memory_after(moment: int, segments: str, order: str) -> tuple[CachingAllocator, list[MemoryBlock]]:
    """Run the first allocations and frees of three training batches on a model of the caching allocator.

    Args:
        moment: How many of these events to run, a number in EVENTS_PLAYED.
        segments: The allocator's kind of segments: "plain" or "expandable".
        order: The order of the batches: "shortest first" or "longest first".

    Returns: the allocator, and the blocks that hold the current batch's tensors.
    """
    memory = CachingAllocator(segments == _EXPANDABLE)
    live: list[MemoryBlock] = []
    for batch, way in _STEPS[:moment]:
        if way == "take":
            live.append(memory.take(f"batch {batch + 1}", ORDERS[order][batch][len(live)] * MEBIBYTE))
        elif way == "free":
            memory.free(live.pop())
        else:
            memory.take("Adam's state", _STATE * MEBIBYTE)
    return memory, live


def memory_map(moment: int, segments: str = _PLAIN, order: str = "shortest first") -> Drawing:
    """Draw the allocator's segments one below the other, each with its blocks: those in use, and free ones.

    Args:
        moment: After how many allocations and frees, a number in EVENTS_PLAYED.
        segments: The allocator's kind of segments: "plain" or "expandable".
        order: The order of the batches: "shortest first" or "longest first".
    """
    memory, live = memory_after(moment, segments, order)
    batch, way = _STEPS[moment - 1]
    drawn = []
    for y, first in enumerate(memory.segments):
        for block in first.blocks:
            use = "this batch" if block in live else "Adam's states" if block.in_use else "free, and reserved"
            size, fill = block.size // MEBIBYTE, FILLS[_USES[use]]
            words = f"{block.name if block.in_use else use}: {size} MiB"
            drawn.append(Box((block.address - first.address) / MEBIBYTE, y, size, 0.8, fill, str(size), words))
    held, reserved = memory.allocated // MEBIBYTE, memory.reserved // MEBIBYTE
    tensor = f"takes tensor {len(live)}" if way == "take" else f"frees tensor {len(live) + 1}"
    doing = "Adam makes a state, which stays" if way == "state" else f"Batch {batch + 1} {tensor}"
    return diagram(
        f"{doing}: {held} MiB allocated, {reserved} MiB reserved,<br>"
        f"{reserved - held} MiB free, of which torch can't give {memory.stuck // MEBIBYTE} MiB back",
        [*legend({use: FILLS[what] for use, what in _USES.items()}), *boxes(drawn)],
        f"Segments of {', '.join(str(sum(b.size for b in s.blocks) // MEBIBYTE) for s in memory.segments)} MiB; "
        f"{held} MiB of them hold tensors. {doing}.",
        width=102, height=7, pixels=380, left=-1, top=-0.3,
    )  # fmt: skip
