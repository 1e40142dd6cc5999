"""What a layer of a Llama keeps, mode by mode: the bars of chapter 8."""

from __future__ import annotations

from actmem.config import Parallel
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LlamaShape
from actmem.rows import total
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import FILLS, axis_end, axis_unit, size_text

#: Mode → its words.
_BARS = {
    "none": "keep everything",
    "selective": "selective: core again",
    "elementwise": "elementwise: no product again",
    "full": "full: all again",
}
_NORMED_HEADS = ("Q", "K", "Q latent", "KV latent")
_KINDS = {
    "norm inputs": ("layer-norm input", ("norm 1 input", "norm 2 input")),
    "inputs of linears": (
        "input of a linear",
        (
            *("QKV projection input", "Q up-projection input", "KV up-projection input", "attention projection input"),
            *("gate and up input", "router input", "down input", "shared down input"),
        ),
    ),
    "Q, K, V": ("Q, K, V", ("Q", "K", "V")),
    "gate and up": ("GeLU input", ("gate", "up", "shared gate", "shared up")),
    "log-sum-exp": ("softmax", ("log-sum-exp",)),
    "Q, K before their norms": ("layer-norm input", ("Q before its norm", "K before its norm")),
    "latents": ("layer-norm input", ("Q latent", "KV latent")),
    "who goes to which expert": (
        "dropout mask",
        ("chosen experts", "routing weights", "dispatch order", "dispatched weights"),
    ),
    "statistics": (
        "extra",
        tuple(f"{name} statistics" for name in ("norm 1", "norm 2", *(f"{x} norm" for x in _NORMED_HEADS))),
    ),
}


def kept_today(shape: LlamaShape, parallel: Parallel = Parallel()) -> Drawing:
    """A bar a mode, stacked by kind of tensor; bytes of one layer on one rank in 16 bits."""
    rows = {mode: {row.term: row.bytes for row in llama_rows(shape, parallel, mode)} for mode in _BARS}
    totals = {mode: total(llama_rows(shape, parallel, mode)) for mode in _BARS}
    unit, name = axis_unit(totals["none"])
    axis = Axis(f"kept by one layer on one rank ({name})", axis_end(1.2 * totals["none"] / unit), unit)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": list(_BARS.values()),
            "x": [sum(rows[mode].get(term, 0) for term in terms) / unit for mode in _BARS],
            "marker": FILLS[fill].marker(),
            "hovertemplate": f"{kind}: %{{x:.3f}} {name}<extra></extra>",
        }
        for kind, (fill, terms) in _KINDS.items()
        if rows["none"].keys() & set(terms)
    ]
    saved = {mode: 1 - totals[mode] / totals["none"] for mode in _BARS}
    return Drawing(
        traces,
        {
            "title": {
                "text": f"Selective recomputation frees {saved['selective']:.1%} of a Llama layer,<br>"
                f"and what needs no product {saved['elementwise']:.0%}"
            },
            "barmode": "stack",
            "xaxis": {"title": {"text": axis.title}, "range": [0, axis.end]},
            "yaxis": {"autorange": "reversed"},
            "height": 440,
            "annotations": [
                {"x": totals[mode] / unit, "y": words, "text": f" {size_text(totals[mode])}", "showarrow": False, "xanchor": "left"}
                for mode, words in _BARS.items()
            ],
        },
        "Bars, bytes kept by one layer: " + ", ".join(f"{_BARS[mode]} {size_text(totals[mode])}" for mode in _BARS) + ".",
        axis,
    )  # fmt: skip
