"""Chapter 5: what recomputation frees and what it costs, over one training step."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from actmem.config import PAPER_MODELS, ModelShape
from actmem.formulas.activations import TABLE2, closed_form, layer_rows
from actmem.formulas.first_stage import selective_saves
from actmem.formulas.flops import layer_overhead
from actmem.rows import total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import STACKED, Drawing, bars, chart, legend, line, points, scale
from actmem_course.figures.style import CARD, FILLS, HELD, INK, Fill
from actmem_course.figures.terms import KINDS, term_of
from actmem_course.figures.units import axis_end, axis_unit, exact_text, size_text
from actmem_course.predicted.recomputation import core_over_gelu, rebuilds, training_moments

_MODES = {"save everything": "none", "selective": "selective", "full": "full"}
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


def recompute_trade(shape: ModelShape) -> Drawing:
    """FLOPs of a layer, forward and backward, in percent of those without recomputation.

    The modes stop at the last tensor that backward reads (``selective`` and ``full``).
    """
    added = {name: layer_overhead(shape, mode) for name, mode in _MODES.items()}
    again = list(added)[1:]
    return bar_chart(
        f"s = {shape.seq_length:,}: without the attention core a layer saves {float(selective_saves(shape)):.0%} fewer "
        f"bytes,<br>for {_percent(added['selective'])} more FLOPs; full recomputation adds {_percent(added['full'])}",
        {
            "forward and backward": dict.fromkeys(added, 100),
            "recomputed": {name: 100 * float(added[name]) for name in again},
        },
        "FLOPs of a layer",
        "%",
        fills=[FILLS["number"], FILLS["recomputed"]],
        notes={name: f"+{_percent(added[name])}" for name in again},
    )


def _percent(share: Fraction) -> str:
    value = float(100 * share)
    return f"{value:.2f}%" if value < 10 else f"{value:.1f}%"


def step_timeline(shape: ModelShape, moment: int, recompute: str = "none") -> Drawing:
    """One training step: a column of blocks for each layer at one moment, and below them the bytes held over the
    whole step.
    """
    moments = training_moments(shape, recompute)
    now, layers, rows = moments[moment], list(range(shape.num_layers)), layer_rows(shape)
    sizes = [one.bytes for one in moments]
    most = total(rows) * shape.num_layers
    unit, unit_name = axis_unit(most)
    there = [{row.term for row in of_layer} for of_layer in now.held]
    blocks = [
        bars(
            row.term, layers, [row.bytes / unit * (row.term in terms) for terms in there], FILLS[term_of(row).kind],
            f"<b>{row.term}</b>, layer %{{x}}<br>{exact_text(row.bytes)}", along="y", showlegend=False,
        )
        for row in rows
    ]  # fmt: skip
    again = [place for place, one in enumerate(moments) if one.again]
    below: dict[str, Any] = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    plain: dict[str, Any] = {"showgrid": False, "ticks": ""}
    held, in_legend = [size / unit for size in sizes], {**below, "showlegend": bool(again)}
    names = {"tickvals": layers, "ticktext": [f"layer {layer}" for layer in layers]}
    return chart(
        f"{now.says[0].upper()}{now.says[1:]}:<br>{size_text(now.bytes)} held, {size_text(max(sizes))} at the fullest",
        [
            *blocks,
            *legend({kind: FILLS[kind] for kind in KINDS if kind != "extra"}, "y"),
            line("held", range(len(sizes)), held, HELD, width=2, shape="hv", fill="tozeroy", **below),
            points("recomputed", again, [held[i] for i in again], CARD, "recomputed", "triangle-up", 9, 1, **in_legend),
            line(
                "now", [moment, moment], [0, sizes[moment] / unit], INK, width=2, mode="lines+markers",
                marker={"color": INK, "size": [0, 11]}, **below,
            ),
        ],
        f"Blocks of memory, {shape.num_layers} layers, recomputation {recompute}, moment {moment} of "
        f"{len(moments) - 1}: {now.says}; "
        f"{now.bytes:,} bytes held, {max(sizes):,} at the fullest.",
        bargap=0.25,
        height=560,
        xaxis={"range": [-0.5, shape.num_layers - 0.5], "anchor": "y", **names, **plain},
        yaxis=scale(f"a layer, {unit_name}", 0, axis_end(total(rows) / unit), domain=[0.5, 1], anchor="x"),
        xaxis2=scale(
            "forward, then backward, by saved tensor", 0, len(moments) - 1, anchor="y2", showticklabels=False, **plain
        ),
        yaxis2=scale(f"held, {unit_name}", 0, axis_end(most / unit), domain=[0, 0.36], anchor="x2"),
        **STACKED,
    )  # fmt: skip


def rebuild_price(shape: ModelShape) -> Drawing:
    """Bytes that a FLOP frees: a bar for each group of tensors that takes a matmul to recompute.

    Groups that take none have no such price; the chapter names them.
    """
    groups = rebuilds(shape)
    priced = sorted((r for r in groups if r.flops), key=lambda r: Fraction(r.bytes, r.flops), reverse=True)
    return bar_chart(
        f"A FLOP in the attention core frees {float(core_over_gelu(groups)):,.0f} times<br>"
        f"the bytes of a FLOP in h→4h: 5a/2, with a = {shape.num_attention_heads:,}",
        {r.name: {r.name: 1000 * r.bytes / r.flops} for r in priced},
        "freed per 1,000 FLOPs",
        "bytes",
        fills=[FILLS[_KIND[r.name]] for r in priced],
        about={
            r.name: f"{size_text(r.bytes)} for {r.flops / 10**9:,.1f} GFLOP<br>recomputed by {r.how}" for r in priced
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
        "saved, relative to tensor parallelism alone",
        "%",
        beside=True,
        fills=list(LADDER.values()),
    )
