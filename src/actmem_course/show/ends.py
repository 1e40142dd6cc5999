"""Chapter 11: the peak of the loss beside what the layers keep, and what the last pipeline stage does more than others."""

from __future__ import annotations

from fractions import Fraction

from actmem.config import Parallel, check_divides
from actmem.formulas.llama_terms import llama_products, llama_rows
from actmem.formulas.loss_peak import LOSSES, loss_peak_rows
from actmem.llama_shape import LlamaShape
from actmem.rows import Row, total
from actmem_course.show.marks import STACKED, Axis, Drawing, bars, chart, downwards, legend
from actmem_course.show.style import BLUE, CARD, GREEN, ORANGE, SKY, VERMILION, Fill, axis_end, axis_unit, size_text

_NAMES = {
    "float32": "loss, float32 logits",
    "16 bits": "loss, 16-bit logits",
    "in place": "loss, softmax in place",
    "in chunks": "loss, a chunk at a time",
}
_LAYERS = "the layers"
_FILLS = {
    _LAYERS: Fill(GREEN, ""),
    "logits and their gradient": Fill(VERMILION, "/"),
    "softmax and its gradient": Fill(ORANGE, "x"),
    "input and its gradient": Fill(BLUE, "", CARD),
    "gradient of the weight": Fill(SKY, "-"),
}


def _kind(row: Row) -> str:
    """The entry of the legend that a term belongs to."""
    last = row.term.split()[-1]
    kinds = {"logits": "logits and their gradient", "softmax": "softmax and its gradient"}
    kinds["weight"] = kinds["gradient"] = "gradient of the weight"
    return kinds.get(last, "input and its gradient")


def loss_bars(shape: LlamaShape, t: int = 1, recompute: str = "none") -> Drawing:
    """What all layers keep of one sequence, and the peak of the loss computed in four ways; one of t ranks, 16 bits."""
    parallel = Parallel(t, t > 1)
    layers = shape.num_layers * total(llama_rows(shape, parallel, recompute))
    tokens = shape.seq_length * shape.micro_batch_size
    peaks = {
        loss: [row for row in loss_peak_rows(loss, tokens, shape.hidden_size, shape.vocab_size, t) if row.bytes]
        for loss in LOSSES
    }
    totals = {_LAYERS: layers, **{_NAMES[loss]: total(rows) for loss, rows in peaks.items()}}
    unit, name = axis_unit(max(totals.values()))
    traces = [
        bars(
            "",
            [_LAYERS],
            [layers / unit],
            _FILLS[_LAYERS],
            f"{shape.num_layers} layers keep {layers:,} B",
            showlegend=False,
        )
    ]
    for loss, rows in peaks.items():
        for kind, fill in list(_FILLS.items())[1:]:
            own = [row for row in rows if _kind(row) == kind]
            hover = "<br>".join([f"<b>{LOSSES[loss]}</b>", *(f"{row.term}: {row.bytes:,} B" for row in own)])
            size = sum(row.bytes for row in own) / unit
            traces.append(bars(kind, [_NAMES[loss]], [size], fill, hover, showlegend=False))
    whole, chunked = (Fraction(total(peaks[loss]), layers) for loss in ("16 bits", "in chunks"))
    sizes = ", ".join(f"{who} {size_text(size)}" for who, size in totals.items())
    beside = {"showarrow": False, "xanchor": "left"}
    return chart(
        f"The loss takes {float(whole):.1f} times what {shape.num_layers} layers keep,<br>a chunk at a time {float(chunked):.2f} times",
        [*traces, *legend(_FILLS)],
        f"Bars at s={shape.seq_length:,}, v={shape.vocab_size:,}, t={t}, bytes on one rank: {sizes}.",
        Axis(f"on one rank ({name})", axis_end(1.2 * max(totals.values()) / unit), unit),
        yaxis=downwards(totals),
        height=470,
        annotations=[{"x": size / unit, "y": who, "text": f" {size_text(size)}", **beside} for who, size in totals.items()],
        **STACKED,
    )  # fmt: skip


def stage_work(shape: LlamaShape, p: int, shared: bool = False) -> Drawing:
    """Forward FLOPs of each of p pipeline stages, in layers; shared: each stage has 1/p of the vocabulary's output layer."""
    layers = check_divides("num_layers", shape.num_layers, "pipeline_parallel_size", p)
    tokens = shape.seq_length * shape.micro_batch_size
    one = sum(llama_products(shape).values())
    output = Fraction(2 * tokens * shape.hidden_size * shape.vocab_size, one)
    ends = [output / p if shared else output * (stage == p - 1) for stage in range(p)]
    names = [f"stage {stage}" for stage in range(p)]
    longest = (layers + max(ends)) / layers
    finding = f"Every stage works {float(longest):.2f} times as long as its layers do" if shared else (
        f"The last stage works {float(longest):.2f} times as long as the others,<br>and they wait for it"
    )  # fmt: skip
    said = f"{float(output):.2f} layers' worth of FLOPs"
    fills = {"layers": Fill(GREEN, ""), "output layer": Fill(VERMILION, "/")}
    return chart(
        finding,
        [
            bars("layers", names, [layers] * p, fills["layers"], f"{layers} layers"),
            bars("output layer", names, map(float, ends), fills["output layer"], "output layer: %{x:.2f} layers' worth"),
        ],
        f"Bars of {p} stages with {layers} layers each; the output layer, {said}, "
        + ("shared by all stages." if shared else "on the last."),
        Axis("forward, in layers' worth of FLOPs", axis_end(float(layers + output)), 1),
        yaxis=downwards(names),
        height=150 + 42 * max(p, 4),
        **STACKED,
    )  # fmt: skip
