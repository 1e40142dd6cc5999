"""Chapter 13: reserved beside allocated. A caching allocator's segments, block by block, and over batches of a real model's tape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from actmem.llama_shape import llama_shape
from actmem.tape.evaluate import BACKWARD, Event, Free, Make, Mark, Resize, sizes_of, with_sizes
from actmem.tape.stage_tapes import stored_tape
from actmem_course.others.allocator import MEBIBYTE, CachingAllocator, MemoryBlock, blocks_of
from actmem_course.show.marks import EMPTY, RANK_FILLS, Axis, Box, Drawing, boxes, chart, diagram, line
from actmem_course.show.style import BLUE, GIB, GREEN, VERMILION, axis_end, size_text

#: Three batches, each longer than the one before: MiB of the tensors that each makes, and frees from the last to the first.
_BATCHES = ((8, 16, 24), (10, 20, 30), (12, 24, 36))
#: What happens: a batch takes its next tensor, or gives the last one back.
_STEPS = [(b, way) for b, sizes in enumerate(_BATCHES) for way in ("take",) * len(sizes) + ("free",) * len(sizes)]
EVENTS_PLAYED = range(1, len(_STEPS) + 1)
_PLAIN, _EXPANDABLE = SEGMENTS = "of their own", "expandable"


def _played(moment: int, segments: str) -> tuple[CachingAllocator, list[MemoryBlock]]:
    """The allocator after so many events, and the blocks that tensors have."""
    memory = CachingAllocator(segments == _EXPANDABLE)
    live: list[MemoryBlock] = []
    for batch, way in _STEPS[:moment]:
        if way == "take":
            live.append(memory.take(str(batch), _BATCHES[batch][len(live)] * MEBIBYTE))
        else:
            memory.free(live.pop())
    return memory, live


def memory_map(moment: int, segments: str = _PLAIN) -> Drawing:
    """All segments after so many events, one below the other: blocks that hold a tensor, and free ones."""
    memory, live = _played(moment, segments)
    batch, way = _STEPS[moment - 1]
    drawn = []
    for y, first in enumerate(memory.segments):
        for block in blocks_of(first):
            size, used = block.size // MEBIBYTE, block in live
            what = f"batch {int(block.line) + 1}" if used else "free, and reserved"
            drawn.append(
                Box((block.address - first.address) / MEBIBYTE, y, size, 0.8, RANK_FILLS[int(block.line)] if used else EMPTY, str(size), f"{what}: {size} MiB")
            )  # fmt: skip
    held, reserved = memory.allocated // MEBIBYTE, memory.reserved // MEBIBYTE
    doing = f"takes tensor {len(live)}" if way == "take" else f"gives tensor {len(live) + 1} back"
    return diagram(
        f"Batch {batch + 1} {doing}:<br>{held} MiB allocated, {reserved} MiB reserved",
        boxes(drawn),
        f"{len(memory.segments)} segments of {', '.join(str(sum(b.size for b in blocks_of(s)) // MEBIBYTE) for s in memory.segments)} MiB; "
        f"{held} MiB of them hold tensors. Batch {batch + 1} {doing}.",
        width=82, height=5, pixels=300, left=-1, top=-0.3,
    )  # fmt: skip


#: Tokens of eight batches, as a data set may bring them.
_LENGTHS = (2048, 3328, 4096, 1536, 2816, 3840, 2304, 3072)
BATCH_ORDERS = {
    "as they come": _LENGTHS,
    "shortest first": tuple(sorted(_LENGTHS)),
    "longest first": tuple(sorted(_LENGTHS, reverse=True)),
    "all padded": (max(_LENGTHS),) * len(_LENGTHS),
}


@cache
def llama_layer_events(tokens: int) -> list[Event]:
    """Forward and backward of one layer of Llama 3 8B that recomputes nothing, as its tape has them, in bytes."""
    d = llama_shape("llama3-8b")
    sizes = {"s": tokens, "b": 1, "h": d.hidden_size, "a": d.num_attention_heads, "k": d.num_key_value_heads, "d": d.d}
    sizes |= {"f": d.ffn_hidden_size, "v": d.vocab_size, "t": 1, "c": 1}
    events, values = stored_tape("llama", "layer none alone").values(sizes)
    return [with_sizes(event, [values[i] for i in sizes_of(event)]) for event in events]


def play_layers(memory: CachingAllocator, events: Sequence[Event], layers: int) -> None:
    """One step of a stack of layers: forward of each, then backward from the last to the first; nothing is left."""
    cut = events.index(Mark(BACKWARD))
    held: dict[tuple[int, int], MemoryBlock] = {}

    def run(layer: int, part: Sequence[Event]) -> None:
        for event in part:
            if isinstance(event, Make):
                held[layer, event.number] = memory.take(event.name, event.bytes)
            elif isinstance(event, (Free, Resize)) and (layer, event.number) in held:  # resized: sent on, so 0 bytes
                memory.free(held.pop((layer, event.number)))

    for layer in range(layers):
        run(layer, events[:cut])
    for layer in reversed(range(layers)):
        run(layer, events[cut:])
    memory.free(*held.values())


@cache
def reserved_after(lengths: tuple[int, ...], expandable: bool, layers: int = 32) -> tuple[list[int], list[int]]:
    """After each batch: the most that was allocated so far, and what is reserved.  Bytes, of the layers' activations alone."""
    memory = CachingAllocator(expandable)
    peaks, reserved = [], []
    for tokens in lengths:
        play_layers(memory, llama_layer_events(tokens), layers)
        peaks.append(memory.peak)
        reserved.append(memory.reserved)
    return peaks, reserved


def reserved_lines(order: str) -> Drawing:
    """Reserved with and without expandable segments, and allocated at most, after each of the batches."""
    lengths = BATCH_ORDERS[order]
    peaks, grown = reserved_after(lengths, True)
    _, plain = reserved_after(lengths, False)
    batches = list(range(1, len(lengths) + 1))
    named = (
        ("reserved, segments of their own", plain, VERMILION, "", "square"),
        ("reserved, expandable segments", grown, GREEN, "dash", "diamond"),
        ("allocated at most", peaks, BLUE, "dot", "circle"),
    )
    return chart(
        f"Batches {order}: {size_text(plain[-1])} reserved<br>for {size_text(peaks[-1])} of tensors; expandable {size_text(grown[-1])}",
        [
            line(
                name, batches, [size / GIB for size in sizes], colour, f"{name} after batch %{{x}}: %{{y:.2f}} GiB",
                dash=dash, mode="lines+markers", marker={"size": 9, "symbol": symbol},
            )
            for name, sizes, colour, dash, symbol in named
        ],
        f"Lines over {len(batches)} batches of {', '.join(f'{tokens:,}' for tokens in lengths)} tokens: "
        + "; ".join(f"{name} {size_text(sizes[-1])}" for name, sizes, *_ in named)
        + ".",
        Axis("GiB, 32 layers of Llama 3 8B", axis_end(44), 1, along="y"),
        xaxis={"title": {"text": "tokens of each batch"}, "tickvals": batches, "ticktext": [f"{n:,}" for n in lengths]},
        height=460,
    )  # fmt: skip
