"""Chapter 13: one GPU from 8k to 1M tokens, one step after the other; and what a layer keeps whose linears compute in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actmem.config import Parallel
from actmem.formulas.communication import wire_bytes
from actmem.formulas.llama_terms import context_exchanges, llama_products, llama_recomputed_flops, llama_rows
from actmem.formulas.loss_peak import loss_peak_rows
from actmem.llama_shape import LlamaShape
from actmem.rows import Row, total
from actmem_course.show.adapters import READERS
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import Drawing
from actmem_course.show.style import BLUE, CARD, GREEN, ORANGE, VERMILION, Fill, size_text

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
        LongStep("MLP in tiles", "Megatron-LM#3644", _peak(shape, "in chunks", TILE), percent(of_mlp)),
        LongStep(
            "inputs on the host", "pytorch#158657", _peak(shape, "in chunks", TILE, True), f"{link} out, and back"
        ),
        LongStep(f"{c} GPUs a sequence", "TRL#6846", _peak(shared(c), "in chunks", TILE, True), f"{size_text(sent)} sent"),
    ]  # fmt: skip


def long_bars(shape: LlamaShape, c: int = 8) -> Drawing:
    """The peak after each step, with who asked for it and what it costs."""
    steps = {f"{one.name} ({one.asked})": one for one in long_steps(shape, c)}
    first, *_, on_one, _ = steps.values()
    return bar_chart(
        f"{shape.seq_length:,} tokens on one GPU: {size_text(first.bytes)} become {size_text(on_one.bytes)}<br>"
        f"(if nothing is recomputed: {size_text(everything_kept(shape))})",
        {part: {name: step.parts.get(part, 0) for name, step in steps.items()} for part in _FILLS},
        "at the peak, beside weights",
        fills=tuple(_FILLS.values()),
        notes={name: f"{size_text(step.bytes)}, {step.price}" for name, step in steps.items()},
    )


_WIDE, _NARROW, _COPIES = "kept in 16 bits", "linears' inputs in 8 bits", "8-bit copies of weights"


def eight_bit_rows(shape: LlamaShape, orientations: int = 1) -> list[Row]:
    """What one Llama layer keeps if its four linears (QKV, projection, gate and up, down) compute in 8 bits.

    Each keeps its input in 8 bits, in one or two ``orientations``, and its weight in two, beside the 16-bit weight that the
    optimizer updates; and a float32 scale of each.  Attention's output stays in 16 bits too: the kernel's backward reads it.
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
