"""Chapter 13: one GPU from 8k to 1M tokens, one step after the other; what a layer keeps whose linears compute in 8 bits;
and reserved beside allocated: a caching allocator's segments, block by block, and over batches of a real model's tape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from actmem.config import Parallel
from actmem.formulas.communication import wire_bytes
from actmem.rows import Row, total
from actmem_course.others.allocator import MEBIBYTE, CachingAllocator, MemoryBlock, blocks_of
from actmem_course.show.adapters import READERS
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import EMPTY, RANK_FILLS, Axis, Box, Drawing, boxes, chart, diagram, line
from actmem_course.show.style import BLUE, CARD, GIB, GREEN, ORANGE, VERMILION, Fill, axis_end, size_text
from actmem_more.llama_shape import LlamaShape, llama_shape
from actmem_more.llama_terms import context_exchanges, llama_products, llama_recomputed_flops, llama_rows
from actmem_more.loss_peak import loss_peak_rows
from actmem_tools.tape.evaluate import BACKWARD, Event, Free, Make, Mark, Resize, sizes_of, with_sizes
from actmem_tools.tape.stage_tapes import stored_tape

_INPUTS, _ATTENTION, _MLP, _LOSS = "inputs of the layers", "attention of one layer", "MLP of one layer", "loss"
_FILLS = {
    _INPUTS: Fill(GREEN, ""),
    _ATTENTION: Fill(BLUE, "", CARD),
    _MLP: Fill(ORANGE, "x"),
    _LOSS: Fill(VERMILION, "/"),
}
#: Tokens of a tile of the MLP and of a chunk of the loss.
TILE, _CHUNK = 4096, 1024


@dataclass(frozen=True)
class LongStep:
    """One step, on top of those before it.  parts: bytes at the peak, beside weights.  price: what this step adds.

    asked: where people asked for it, or who wrote it.
    """

    name: str
    asked: str
    parts: Mapping[str, int]
    price: str = ""

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def mlp_peak_bytes(tokens: int, hidden_size: int, ffn_hidden_size: int, tile: int | None = None) -> int:
    """What an MLP's forward and backward hold at most, beside weights and their gradients, in 16 bits.

    Whole: 6h + 10f bytes a token: x, y and y's gradient; gate and up, their gradients, and that of the down product's input.
    In tiles either 10h, with x's gradient in tiles and joined, or before that 8h and the last tile's 10f.
    """
    h, f = hidden_size, ffn_hidden_size
    if tile is None:
        return tokens * (6 * h + 10 * f)
    return max(10 * tokens * h, 8 * tokens * h + min(tile, tokens) * (10 * f - 2 * h))


def _peak(shape: LlamaShape, loss: str, tile: int | None = None, on_host: bool = False) -> dict[str, int]:
    """Parts at the fuller of two moments: the loss, and the backward pass of a recomputed layer's MLP."""
    tokens, h = shape.seq_length * shape.micro_batch_size, shape.hidden_size
    rows = {row.term: row.bytes for row in llama_rows(shape)}
    x = rows["norm 1 input"]
    # Two on the device, of which one is on its way, or all; and what comes after the last layer, later its gradient.
    inputs = x * (2 if on_host else shape.num_layers) + x
    attention = sum(rows.values()) - x - sum(rows[term] for term in ("gate and up input", "gate", "up", "down input"))
    # The MLP's output isn't there any more, and its gradient is among the inputs.
    mlp = mlp_peak_bytes(tokens, h, shape.ffn_hidden_size, tile) - 4 * tokens * h
    at_the_loss = {_INPUTS: inputs, _LOSS: total(loss_peak_rows(loss, tokens, h, shape.vocab_size, chunk=_CHUNK))}
    in_a_layer = {_INPUTS: inputs, _ATTENTION: attention, _MLP: mlp}
    return max(at_the_loss, in_a_layer, key=lambda parts: sum(parts.values()))


def everything_kept(shape: LlamaShape) -> int:
    """Bytes if each layer keeps all that its backward reads, and the loss is of 16-bit logits."""
    tokens = shape.seq_length * shape.micro_batch_size
    last = loss_peak_rows("16 bits", tokens, shape.hidden_size, shape.vocab_size)
    return shape.num_layers * total(llama_rows(shape)) + 2 * tokens * shape.hidden_size + total(last)


def long_steps(shape: LlamaShape, c: int = 8) -> list[LongStep]:
    """Recomputed layers, then one step after the other; the last one on each of c GPUs that share the sequence."""
    layers, tokens = shape.num_layers, shape.seq_length * shape.micro_batch_size
    products = llama_products(shape)
    output = 2 * tokens * shape.hidden_size * shape.vocab_size
    step = 3 * (layers * sum(products.values()) + output)

    def percent(flops: int) -> str:
        return f"+{100 * flops / step:.2g}% FLOPs"

    def shared(c: int) -> LlamaShape:
        return shape.with_sizes(seq_length=shape.seq_length // c)

    link = size_text(2 * tokens * shape.hidden_size * layers)
    sent = layers * wire_bytes(context_exchanges(shape, Parallel(context_parallel_size=c), recompute="full"))
    again = layers * llama_recomputed_flops(shape, "full")
    of_mlp = layers * (products["gate and up"] + products["down"])
    return [
        LongStep("layers recomputed", "Chen et al., 2016", _peak(shape, "16 bits"), percent(again)),
        LongStep("loss in chunks", "Liger Kernel, 2024", _peak(shape, "in chunks"), percent(output)),
        LongStep(
            "the layers' inputs on the host", "pytorch#158657", _peak(shape, "in chunks", None, True), f"{link} out, and back"
        ),
        LongStep("MLP in tiles", "Megatron-LM#3644", _peak(shape, "in chunks", TILE, True), percent(of_mlp)),
        LongStep(f"{c} GPUs a sequence", "TRL#6846", _peak(shared(c), "in chunks", TILE, True), f"{size_text(sent)} sent"),
    ]  # fmt: skip


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
        notes={name: f"{size_text(step.bytes)}, {step.price}" for name, step in steps.items()},
        about={name: step.asked for name, step in steps.items()},
    )


_WIDE, _NARROW, _COPIES = "kept in 16 bits", "linears' inputs in 8 bits", "8-bit copies of weights"


def eight_bit_rows(shape: LlamaShape, orientations: int = 1) -> list[Row]:
    """What one Llama layer keeps if its four linears (QKV, projection, gate and up, down) compute in 8 bits.

    Each keeps its input in 8 bits, in one or two ``orientations``, its weight in two beside the 16-bit one, and a float32
    scale of each.  Attention's output stays in 16 bits too: the kernel's backward reads it.
    """
    rows, elements = [], 0
    for row in llama_rows(shape):
        if row.term in READERS:
            elements += row.bytes // 2
        if row.term not in READERS or row.term == "attention projection input":
            rows.append(Row(_WIDE, row.bytes, source=row.term))
    weights = shape.attention_weights + shape.mlp_weights
    return [
        *rows,
        Row(_NARROW, orientations * elements),
        Row(_COPIES, 2 * weights),
        Row("scales", 4 * 2 * len(READERS)),
    ]


def break_even_tokens(shape: LlamaShape) -> int:
    """Tokens from which on 8-bit linears save: two copies of each weight against h + f bytes a token."""
    weights = shape.attention_weights + shape.mlp_weights
    return -(-2 * weights // (shape.hidden_size + shape.ffn_hidden_size))


def eight_bit_bars(shape: LlamaShape) -> Drawing:
    """What a layer keeps in 16 bits, and with linears in 8 bits that keep one or both orientations of their inputs."""
    each = {
        "16 bits": [Row(_WIDE, total(llama_rows(shape)))],
        "8 bits, inputs in one orientation": eight_bit_rows(shape),
        "8 bits, inputs in both": eight_bit_rows(shape, 2),
    }
    parts = {
        part: {name: total(row for row in rows if row.term == part) for name, rows in each.items()}
        for part in (_WIDE, _NARROW, _COPIES)
    }
    more = total(each["8 bits, inputs in one orientation"]) - total(each["16 bits"])
    says = f"{size_text(abs(more))} {'more' if more > 0 else 'less'}"
    return bar_chart(
        f"{shape.seq_length * shape.micro_batch_size:,} tokens: with linears in 8 bits a layer keeps {says}<br>"
        f"(as much as in 16 bits at {break_even_tokens(shape):,} tokens)",
        parts,
        "kept by one layer of Llama 3 8B",
        fills=(Fill(GREEN, ""), Fill(BLUE, "", CARD), Fill(VERMILION, "/")),
    )


# Reserved beside allocated.

#: MiB of the tensors of three batches, each longer than the one before, and of each state that the first step makes.
_BATCHES, _STATE = ((10, 14, 18), (12, 16, 22), (14, 20, 26)), 8
#: What happens: a batch takes its next tensor, or gives the last one back; Adam takes a state, which stays.
_STEPS = [(b, way) for b in range(3) for way in ("take",) * 3 + ("free",) * 3 + ("state",) * 3 * (b == 0)]
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
        f"{len(memory.segments)} segment{'s' * (len(memory.segments) > 1)} of {', '.join(str(sum(b.size for b in blocks_of(s)) // MEBIBYTE) for s in memory.segments)} MiB; "
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
