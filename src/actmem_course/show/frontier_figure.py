"""Bytes kept against FLOPs added: all choices of what to run again, and the line that none beats."""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.rows import total
from actmem_course.others.frontier import FrontierPoint, all_choices, frontier
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, INK, VERMILION

_NAMED = ("none", "selective", "elementwise", "full")


def frontier_figure(shape: ModelShape) -> Drawing:
    """x: FLOPs added to the layer's forward and backward, in percent.  y: bytes kept, in sbh.  16 bits, one rank."""
    _, b, h, s = shape.letters()
    work = 72 * s * b * h * h + 12 * s * s * b * h
    every, best = all_choices(shape), frontier(shape)
    named = {
        mode: (float(100 * layer_overhead(shape, mode)), total(layer_rows(shape, recompute=mode))) for mode in _NAMED
    }
    kept = {mode: size / (s * b * h) for mode, (_, size) in named.items()}

    def points(choices: list[FrontierPoint], **options) -> dict:
        return {
            "type": "scatter",
            "x": [100 * choice.flops / work for choice in choices],
            "y": [choice.bytes / (s * b * h) for choice in choices],
            "customdata": [", ".join(choice.products) or "no product" for choice in choices],
            "hovertemplate": "%{customdata} again<br>+%{x:.2f}% FLOPs, %{y:.1f} sbh<extra></extra>",
            **options,
        }

    return Drawing(
        [
            points(
                every, mode="markers", name="every choice", marker={"color": BLUE, "size": 6, "symbol": "circle-open"}
            ),
            points(
                best,
                mode="lines+markers",
                name="none keeps less for less",
                line={"color": VERMILION},
                marker={"size": 9},
            ),
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": "the named modes",
                "x": [x for x, _ in named.values()],
                "y": list(kept.values()),
                "text": list(named),
                "textposition": "top right",
                "marker": {"color": INK, "symbol": "diamond", "size": 10},
                "cliponaxis": False,
                "hovertemplate": "%{text}: +%{x:.2f}% FLOPs, %{y:.1f} sbh<extra></extra>",
            },
        ],
        {
            "title": {
                "text": f"Elementwise keeps {kept['elementwise']:.0f} sbh where selective keeps {kept['selective']:.0f},<br>for the same FLOPs"
            },
            "xaxis": {"title": {"text": "FLOPs added to a layer's forward and backward (%)"}, "range": [-1, 34]},
            "yaxis": {"title": {"text": "kept by a layer (sbh)"}, "range": [0, 1.15 * kept["none"]]},
            "height": 480,
        },
        "Points, percent of FLOPs added and sbh kept: "
        + ", ".join(f"{mode} {named[mode][0]:.2f} and {kept[mode]:.1f}" for mode in _NAMED)
        + f"; the line has {len(best)} of {len(every)} choices.",
    )
