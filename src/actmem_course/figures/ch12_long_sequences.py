"""Chapter 12: one GPU from 8k to 1M tokens, linears in 8 bits, and what an allocator reserves beside what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from actmem.rows import Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.diagrams import EMPTY, RANK_FILLS, Box, boxes, diagram
from actmem_course.figures.marks import Axis, Drawing, chart, line
from actmem_course.figures.style import BLUE, COMPARED, FILLS, HELD
from actmem_course.figures.units import GIB, axis_end, size_text
from actmem_course.others.allocator import MEBIBYTE, CachingAllocator, MemoryBlock, blocks_of
from actmem_course.predicted.long_sequences import (
    ATTENTION,
    COPIES,
    INPUTS,
    LOSS,
    MLP,
    NARROW,
    WIDE,
    LongStep,
    break_even_tokens,
    eight_bit_rows,
    everything_kept,
    long_steps,
)
from actmem_more.llama_shape import LlamaShape, llama_shape
from actmem_more.llama_terms import llama_rows
from actmem_tools.tape.evaluate import BACKWARD, Event, Free, Make, Mark, Resize, sizes_of, with_sizes
from actmem_tools.tape.stage_tapes import stored_tape

_FILLS = {
    INPUTS: FILLS["layer-norm input"],
    ATTENTION: FILLS["Q, K, V"],
    MLP: FILLS["GeLU input"],
    LOSS: FILLS["softmax"],
}


def price(step: LongStep) -> str:
    """What a step adds, in a few words."""
    if step.copied_bytes:
        return f"{size_text(step.copied_bytes)} out, and back"
    return f"{size_text(step.sent_bytes)} sent" if step.sent_bytes else f"+{100 * step.added_flops:.2g}% FLOPs"


def long_bars(shape: LlamaShape, c: int = 8) -> Drawing:
    """The peak after each step, with who asked for it and what it costs."""
    steps = {one.name: one for one in long_steps(shape, c)}
    first, *_, on_one, _ = steps.values()
    return bar_chart(
        f"{shape.seq_length:,} tokens on one GPU: {size_text(first.bytes)} become {size_text(on_one.bytes)}<br>"
        f"(nothing recomputed: {size_text(everything_kept(shape))}; each price is one step's alone)",
        {part: {name: step.parts.get(part, 0) for name, step in steps.items()} for part in _FILLS},
        "at the peak, beside weights",
        fills=tuple(_FILLS.values()),
        notes={name: f"{size_text(step.bytes)}, {price(step)}" for name, step in steps.items()},
        about={name: step.asked for name, step in steps.items()},
    )


def eight_bit_bars(shape: LlamaShape) -> Drawing:
    """What a layer keeps in 16 bits, and with linears in 8 bits that keep one or both orientations of their inputs."""
    each = {
        "16 bits": [Row(WIDE, total(llama_rows(shape)))],
        "8 bits, inputs in one orientation": eight_bit_rows(shape),
        "8 bits, inputs in both": eight_bit_rows(shape, 2),
    }
    parts = {
        part: {name: total(row for row in rows if row.term == part) for name, rows in each.items()}
        for part in (WIDE, NARROW, COPIES)
    }
    more = total(each["8 bits, inputs in one orientation"]) - total(each["16 bits"])
    says = f"{size_text(abs(more))} {'more' if more > 0 else 'less'}"
    return bar_chart(
        f"{shape.seq_length * shape.micro_batch_size:,} tokens: with linears in 8 bits a layer keeps {says}<br>"
        f"(as much as in 16 bits at {break_even_tokens(shape):,} tokens)",
        parts,
        "kept by one layer of Llama 3 8B",
        fills=[FILLS[what] for what in ("activations", "input of a linear", "weights")],
    )


# Reserved beside allocated.

#: MiB of the tensors of three batches, each longer than the one before, and of each state that the first step makes.
_BATCHES, _STATE = ((10, 14, 18), (12, 16, 22), (14, 20, 26)), 8
#: What happens: a batch takes its next tensor, or gives the last one back; Adam takes a state, which stays.
_STEPS = [(b, way) for b in range(3) for way in (*["take"] * 3, *["free"] * 3, *([] if b else ["state"] * 3))]
EVENTS_PLAYED = range(1, len(_STEPS) + 1)
_PLAIN, _EXPANDABLE = SEGMENTS = "of their own", "expandable"


def memory_after(moment: int, segments: str) -> tuple[CachingAllocator, list[MemoryBlock]]:
    """The allocator after so many events, and the blocks that a batch's tensors have."""
    memory = CachingAllocator(segments == _EXPANDABLE)
    live: list[MemoryBlock] = []
    for batch, way in _STEPS[:moment]:
        if way == "take":
            live.append(memory.take(f"batch {batch + 1}", _BATCHES[batch][len(live)] * MEBIBYTE))
        elif way == "free":
            memory.free(live.pop())
        else:
            memory.take("Adam's state", _STATE * MEBIBYTE)
    return memory, live


def memory_map(moment: int, segments: str = _PLAIN) -> Drawing:
    """All segments after so many events, one below the other: blocks that hold a tensor, and free ones."""
    memory, live = memory_after(moment, segments)
    batch, way = _STEPS[moment - 1]
    drawn = []
    for y, first in enumerate(memory.segments):
        for block in blocks_of(first):
            size, fill = block.size // MEBIBYTE, RANK_FILLS[batch if block in live else 3] if block.in_use else EMPTY
            words = f"{block.name if block.in_use else 'free, and reserved'}: {size} MiB"
            drawn.append(Box((block.address - first.address) / MEBIBYTE, y, size, 0.8, fill, str(size), words))
    held, reserved = memory.allocated // MEBIBYTE, memory.reserved // MEBIBYTE
    tensor = f"takes tensor {len(live)}" if way == "take" else f"gives tensor {len(live) + 1} back"
    doing = "Adam makes a state, which stays" if way == "state" else f"Batch {batch + 1} {tensor}"
    return diagram(
        f"{doing}:<br>{held} MiB allocated, {reserved} MiB reserved",
        boxes(drawn),
        f"{len(memory.segments)} segment{'s' * (len(memory.segments) > 1)} of "
        f"{', '.join(str(sum(b.size for b in blocks_of(s)) // MEBIBYTE) for s in memory.segments)} MiB; "
        f"{held} MiB of them hold tensors. {doing}.",
        width=102, height=7, pixels=340, left=-1, top=-0.3,
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
    """After each batch: the most that was allocated so far, and what is reserved.  Bytes, of the layers'
    activations alone.
    """
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
        ("reserved, segments of their own", plain, COMPARED, "", "square"),
        ("reserved, expandable segments", grown, BLUE, "dash", "diamond"),
        ("allocated at most", peaks, HELD, "dot", "circle"),
    )
    return chart(
        f"Batches {order}: {size_text(plain[-1])} reserved<br>for {size_text(peaks[-1])} of tensors; "
        f"expandable {size_text(grown[-1])}",
        [
            line(
                name, batches, [size / GIB for size in sizes], colour, f"{name} after batch %{{x}}: %{{y:.2f}} GiB",
                dash, symbol=symbol, size=9,
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
