"""Chapter 5: what recomputation frees and what it costs, from one training step to a larger microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from actmem.config import PAPER_MODELS, ConfigError, ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, TABLE2, closed_form, layer_rows
from actmem.formulas.first_stage import selective_saves
from actmem.formulas.flops import layer_overhead, layer_products
from actmem.recipes import Recompute
from actmem.rows import Row, total
from actmem_course.figures.bar_chart import bar_chart
from actmem_course.figures.ch02_counting_bytes import kinds_legend
from actmem_course.figures.marks import STACKED, Drawing, bars, chart, line, points, scale
from actmem_course.figures.style import (
    CARD,
    COMPARED,
    FILLS,
    HELD,
    INK,
    Fill,
    axis_end,
    axis_unit,
    exact_text,
    size_text,
)
from actmem_course.figures.terms import term_of

_MODES = {"none": "keep everything", "selective": "selective", "full": "full"}
#: What a tensor's group looks like in the price of its bytes.
_KIND = {
    "Q, K, V": "Q, K, V",
    "attention core": "softmax",
    "attention output": "input of a linear",
    "middle of the layer": "layer-norm input",
    "GeLU input": "GeLU input",
}
_BASELINE = "tensor"
LADDER = {
    "tensor": FILLS["others"],
    "tensor+sequence": Fill("#C9E8DD", "."),
    "tensor+selective": Fill("#8CCFB8", "-"),
    "tensor+sequence+selective": FILLS["ours"],
    "full": FILLS["recomputed"],
}
#: Values of φ along the axis, in percent.
SHARES = tuple(range(0, 101, 2))
LINES = (
    ("selective", "selective", HELD, "solid", "circle"),
    ("paper-full", "full, run to its end", COMPARED, "dash", "diamond"),
)


def recompute_trade(shape: ModelShape) -> Drawing:
    """Six bars, each in percent of its own bar without recomputation: three of bytes, three of FLOPs.

    The modes stop at the last tensor that backward reads (``selective`` and ``full``).
    """
    whole = total(layer_rows(shape))
    left = {mode: total(layer_rows(shape, recompute=mode)) for mode in _MODES}
    core = 100 * sum(row.bytes for row in layer_rows(shape) if row.term in CORE_ATTENTION_TERMS) / whole
    added = {mode: layer_overhead(shape, mode) for mode in _MODES}
    kept = {f"bytes, {name}": 100 * left[mode] / whole for mode, name in _MODES.items()}
    first, *again = work = {f"FLOPs, {name}": 100 * float(added[mode]) for mode, name in _MODES.items()}
    everything = f"bytes, {_MODES['none']}"
    sizes = {f"bytes, {name}": size_text(left[mode]) for mode, name in _MODES.items()}
    percents = {f"FLOPs, {name}": f"+{_percent(added[mode])}" for mode, name in _MODES.items() if mode != "none"}
    return bar_chart(
        f"s = {shape.seq_length:,}: dropping the attention core frees {float(selective_saves(shape)):.0%} of the bytes<br>"
        f"for {_percent(added['selective'])} more FLOPs; full recomputation costs {_percent(added['full'])}",
        {
            "kept for backward": {**kept, everything: 100 - core},
            "attention core, 5as²b": {everything: core},
            "the layer, forward and backward": dict.fromkeys(work, 100),
            "run again": {name: work[name] for name in again},
        },
        "of the layer without recomputation",
        "%",
        fills=[FILLS[what] for what in ("activations", "softmax", "number", "recomputed")],
        notes={**sizes, first: "72sbh² + 12s²bh", **percents},
    )


def _percent(share: Fraction) -> str:
    value = float(100 * share)
    return f"{value:.2f}%" if value < 10 else f"{value:.1f}%"


@dataclass(frozen=True)
class Moment:
    """What is held after one change.  held: for each layer the rows that are there; again: they were just recomputed."""

    says: str
    held: tuple[tuple[Row, ...], ...]
    again: bool = False

    @property
    def bytes(self) -> int:
        """Of all layers together."""
        return sum(total(rows) for rows in self.held)


@cache
def training_moments(shape: ModelShape, recompute: str = "none") -> tuple[Moment, ...]:
    """Forward and backward through the shape's layers, one stored tensor at a time, from nothing to nothing.

    Backward takes a layer's tensors in reverse.  Where it needs one that forward dropped, all that the layer
    has dropped is recomputed first.
    """
    whole, kept = layer_rows(shape), {row.term for row in layer_rows(shape, recompute=recompute)}
    held: list[list[Row]] = [[] for _ in range(shape.num_layers)]
    found = [Moment("before forward", _frozen(held))]
    for layer, rows in enumerate(held):
        for row in whole:
            if row.term in kept:
                rows.append(row)
                found.append(Moment(f"forward, layer {layer}: {row.term} is kept", _frozen(held)))
    for layer in reversed(range(shape.num_layers)):
        there = {row.term for row in held[layer]}
        for row in reversed(whole):
            if row.term not in there:
                held[layer] = list(whole[: whole.index(row) + 1])
                there = {one.term for one in held[layer]}
                found.append(
                    Moment(f"backward, layer {layer}: what was dropped is recomputed", _frozen(held), again=True)
                )
            held[layer].pop()
            found.append(Moment(f"backward, layer {layer}: {row.term} is freed", _frozen(held)))
    return tuple(found)


def _frozen(held: Sequence[Sequence[Row]]) -> tuple[tuple[Row, ...], ...]:
    return tuple(map(tuple, held))


def step_timeline(shape: ModelShape, moment: int, recompute: str = "none") -> Drawing:
    """One training step: a column of blocks for each layer at one moment, and below them the bytes held over the whole step."""
    moments = training_moments(shape, recompute)
    now, layers, rows = moments[moment], list(range(shape.num_layers)), layer_rows(shape)
    sizes = [one.bytes for one in moments]
    most = total(rows) * shape.num_layers
    unit, unit_name = axis_unit(most)
    there = [{row.term for row in of_layer} for of_layer in now.held]
    blocks = [
        bars(
            row.term, layers, [row.bytes / unit if row.term in terms else 0 for terms in there], FILLS[term_of(row).kind],
            f"<b>{row.term}</b>, layer %{{x}}<br>{exact_text(row.bytes)}", along="y", showlegend=False,
        )
        for row in rows
    ]  # fmt: skip
    again = [place for place, one in enumerate(moments) if one.again]
    below: dict[str, Any] = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    plain: dict[str, Any] = {"showgrid": False, "ticks": ""}
    names = {"tickvals": layers, "ticktext": [f"layer {layer}" for layer in layers]}
    return chart(
        f"{now.says[0].upper()}{now.says[1:]}:<br>{size_text(now.bytes)} held, {size_text(max(sizes))} at the fullest",
        [
            *blocks,
            *kinds_legend(rows, "y"),
            line("held", range(len(sizes)), [size / unit for size in sizes], HELD, width=2, shape="hv", fill="tozeroy", **below),
            points("recomputed", again, [sizes[place] / unit for place in again], CARD, "recomputed", "triangle-up", 9, 1, **{**below, "showlegend": bool(again)}),
            line(
                "now", [moment, moment], [0, sizes[moment] / unit], INK, width=2, mode="lines+markers",
                marker={"color": INK, "size": [0, 11]}, **below,
            ),
        ],
        f"Blocks of memory, {shape.num_layers} layers, recomputation {recompute}, moment {moment} of {len(moments) - 1}: {now.says}; "
        f"{now.bytes:,} bytes held, {max(sizes):,} at the fullest.",
        bargap=0.25,
        height=560,
        xaxis={"range": [-0.5, shape.num_layers - 0.5], "anchor": "y", **names, **plain},
        yaxis=scale(f"a layer, {unit_name}", 0, axis_end(total(rows) / unit), domain=[0.5, 1], anchor="x"),
        xaxis2=scale(
            "forward, then backward: one stored tensor at a time", 0, len(moments) - 1, anchor="y2", showticklabels=False, **plain
        ),
        yaxis2=scale(f"held, {unit_name}", 0, axis_end(most / unit), domain=[0, 0.36], anchor="x2"),
        **STACKED,
    )  # fmt: skip


@dataclass(frozen=True)
class Rebuild:
    """Tensors that are recomputed together.  how: from what, by what.  flops: of its matrix products."""

    name: str
    terms: tuple[str, ...]
    how: str
    bytes: int
    flops: int


#: Tensors that are recomputed together, how, and the products that this takes.
_GROUPS = (
    ("layer-norm outputs", ("QKV projection input", "h→4h input"), "layer norm of its input", ""),
    ("Q, K, V", ("Q", "K", "V"), "QKV projection", "QKV projection"),
    ("attention core", CORE_ATTENTION_TERMS, "QKᵀ, softmax, dropout", "QKᵀ"),
    ("attention output", ("attention projection input",), "attention over V", "attention over V"),
    ("middle of the layer", ("layer-norm 2 input",), "attention projection, dropout, sum", "attention projection"),
    ("GeLU input", ("GeLU input",), "h→4h", "h→4h"),
    ("GeLU output", ("4h→h input",), "GeLU of its input", ""),
    ("block dropout masks", ("attention dropout mask", "MLP dropout mask"), "draw again", ""),
)


def rebuilds(shape: ModelShape) -> list[Rebuild]:
    """All tensors of a layer except its input, from which the rest is computed; 16 bits, one rank.

    In the order of the forward pass.  Bytes add up to equation 1 without the input's 2sbh,
    FLOPs to the forward pass without the last product, 4h→h, whose output nothing keeps.
    """
    products = {"": 0, **layer_products(shape)}
    sizes = {row.term: row.bytes for row in layer_rows(shape)}
    return [
        Rebuild(name, terms, how, sum(sizes[term] for term in terms), products[product])
        for name, terms, how, product in _GROUPS
    ]


def core_over_gelu(groups: Sequence[Rebuild]) -> Fraction:
    """Bytes freed per FLOP in the attention core, relative to h→4h."""
    core, gelu = (next(one for one in groups if one.name == name) for name in ("attention core", "GeLU input"))
    return Fraction(core.bytes, core.flops) / Fraction(gelu.bytes, gelu.flops)


def rebuild_price(shape: ModelShape) -> Drawing:
    """What a FLOP buys: a bar for each group of tensors that takes a matrix product to rebuild, the most expensive at the bottom.

    Groups that need none have no such price; the table next to the figure names them.
    """
    groups = rebuilds(shape)
    priced = sorted((r for r in groups if r.flops), key=lambda r: Fraction(r.bytes, r.flops), reverse=True)
    return bar_chart(
        f"A FLOP in the attention core gives back {float(core_over_gelu(groups)):,.0f} times<br>"
        f"the bytes of a FLOP in h→4h: 5a/2, with a = {shape.num_attention_heads:,}",
        {r.name: {r.name: 1000 * r.bytes / r.flops} for r in priced},
        "freed per 1,000 FLOPs",
        "bytes",
        fills=[FILLS[_KIND[r.name]] for r in priced],
        about={
            r.name: f"{size_text(r.bytes)} for {r.flops / 10**9:,.1f} GFLOP<br>made again by {r.how}" for r in priced
        },
    )


def memory_ladder(seq_length: int, tensor_parallel_size: int) -> Drawing:
    """Figure 7: what each row of table 2 leaves of the tensor-parallel baseline, for the four models, in percent.

    Raises ConfigError where t cannot share a model.
    """
    rows = {row.name: row for row in TABLE2}
    shapes = {name: model.shape.with_sizes(seq_length=seq_length) for name, model in PAPER_MODELS.items()}
    t = tensor_parallel_size
    sizes = {way: {name: closed_form(rows[way], shape, t) for name, shape in shapes.items()} for way in LADDER}
    shares = {
        way: {name: 100 * size / sizes[_BASELINE][name] for name, size in of.items()} for way, of in sizes.items()
    }
    both, full = shares["tensor+sequence+selective"].values(), shares["full"].values()
    return bar_chart(
        f"s = {seq_length:,}, t = {t}: both methods leave {min(both):.1f} to {max(both):.1f}% of the baseline,<br>"
        f"full recomputation {min(full):.1f} to {max(full):.1f}%",
        shares,
        "kept, of tensor parallelism alone",
        "%",
        beside=True,
        fills=list(LADDER.values()),
    )


# Freed bytes become sequences: a step has a fixed cost, whatever the microbatch (kernel launches, the optimizer's step,
# gradient exchanges, products too small to fill the device), and a cost per sequence.  Recomputation raises the cost per
# sequence; more sequences share the fixed cost.  Bytes are the peak of L layers on one device, reached when backward has
# recomputed one layer's tensors.

_overhead = cache(layer_overhead)


def fullest_bytes(shape: ModelShape, recompute: Recompute | str) -> int:
    """Peak bytes of the layers: what they keep when backward begins, with one layer recomputed."""
    whole, left = total(layer_rows(shape)), total(layer_rows(shape, recompute=recompute))
    return shape.num_layers * left + (whole - left)


@cache
def batch_factor(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """How many sequences fit in the memory of one without recomputation."""
    return Fraction(fullest_bytes(shape, "none"), fullest_bytes(shape, recompute))


def throughput(shape: ModelShape, recompute: Recompute | str, fixed_share: Fraction) -> Fraction:
    """Sequences per second, relative to no recomputation in the same memory.

    fixed_share φ: the fixed cost of a step, relative to the cost of the sequences that fit
    without recomputation.  (1 + φ) / (1 + overhead + φ/factor).
    """
    return (1 + fixed_share) / (1 + _overhead(shape, recompute) + fixed_share / batch_factor(shape, recompute))


def break_even(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """The φ above which the mode is faster: overhead / (1 − 1/factor).

    Raises ConfigError for a single layer: backward recomputes all of it, so nothing is freed.
    """
    if batch_factor(shape, recompute) == 1:
        raise ConfigError(
            "num_layers", f"recompute = {Recompute.of(recompute).name!r} frees nothing with {shape.num_layers} layer(s)"
        )
    return layer_overhead(shape, recompute) / (1 - 1 / batch_factor(shape, recompute))


def batch_payoff(shape: ModelShape, fixed_percent: int) -> Drawing:
    """When a larger microbatch pays for recomputation: throughput over φ, in the memory of one sequence that keeps everything.

    Full recomputation runs to its end, as the paper's baseline does.
    """
    traces: list[dict] = []
    reached = []
    for mode, name, colour, dash, symbol in LINES:
        hover = f"<b>{name}</b>, φ = %{{x}}%: %{{y:.3f}} times"
        rates = [float(throughput(shape, mode, Fraction(share, 100))) for share in SHARES]
        reached.append(float(throughput(shape, mode, Fraction(fixed_percent, 100))))
        long_name = f"{name}, {float(batch_factor(shape, mode)):.1f} times the microbatch"
        traces += [
            line(long_name, SHARES, rates, colour, hover, dash),
            points(f"{name} at this φ", [fixed_percent], reached[-1:], colour, hover, symbol, showlegend=False),
        ]
    even = {mode: float(100 * break_even(shape, mode)) for mode, *_ in LINES}
    return chart(
        f"A larger microbatch pays for selective recomputation above φ = {even['selective']:.2f}%,<br>"
        f"for full recomputation, run to its end, above φ = {even['paper-full']:.0f}%",
        [*traces, line("no recomputation", [SHARES[0], SHARES[-1]], [1, 1], INK, None, "dot", 1.5)],
        f"Lines of throughput over the fixed share φ: selective recomputation passes 1 at {even['selective']:.2f}%, full, run to its end, at "
        f"{even['paper-full']:.1f}%; at φ={fixed_percent}% they reach {reached[0]:.3f} and {reached[1]:.3f}.",
        xaxis=scale("φ: fixed part of a pass, percent of the work of its sequences", -1, 101, ticksuffix="%"),
        yaxis=scale("sequences a second, relative", 0.7, 1.9),
        height=430,
    )
