"""Chapter 8: every choice of what to recompute, offload or compress."""

from __future__ import annotations

from functools import lru_cache
from textwrap import wrap
from typing import Any

from actmem.config import ModelShape
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.rows import total
from actmem_course.figures.marks import Drawing, chart, points, scale
from actmem_course.figures.style import BLUE, COMPARED, HELD, INK, PURPLE
from actmem_more.per_tensor_choices import LayerChoice, PricedLayer, Rates, choices, frontier, recompute_choices
from actmem_tools.plan.step_time import DEVICES, MATMUL_SHARE

_NAMED = ("none", "selective", "elementwise", "full")


@lru_cache(maxsize=32)
def _choices_of(shape: ModelShape, *allowed: str) -> tuple[LayerChoice, ...]:
    """The layer's best choices of actions; the slider changes the link's rate, which none of them depends on."""
    return tuple(choices(PricedLayer.of(shape), allowed))


def frontier_figure(shape: ModelShape, gigabytes: int = 25) -> Drawing:
    """What a layer saves for how much more time, and the lines that nothing beats; 16 bits, one A100.

    x: time added to the layer's forward and backward, in percent, by recomputed matmuls and by copies that
    computing can't hide; what needs no matmul counts as free.  y: bytes saved on the device, in sbh.  gigabytes: that
    the link to the host takes a second, each way.
    """
    sbh = shape.seq_length * shape.micro_batch_size * shape.hidden_size
    layer = PricedLayer.of(shape)
    rate = DEVICES["a100"].flops_per_second * MATMUL_SHARE
    rates = Rates(rate, gigabytes * 1e9, sum(layer.flops.values()) / rate)
    recompute = recompute_choices(layer)
    added = {mode: float(100 * layer_overhead(shape, mode)) for mode in _NAMED}
    kept = {mode: total(layer_rows(shape, recompute=mode)) / sbh for mode in _NAMED}
    hover = "+%{x:.2f}% time, %{y:.1f} sbh"

    def share(choice: LayerChoice) -> float:
        return 100 * choice.seconds(rates) / (3 * rates.forward)

    def said(choice: LayerChoice) -> str:
        parts = [f"recompute: {', '.join(choice.matmuls) or 'no matmul'}"]
        for action in ("offload", "compress"):
            terms = ", ".join(term for term, chosen in choice.actions.items() if chosen == action)
            parts += [f"{action}: {terms}"] if terms else []
        return "<br>".join(line for part in parts for line in wrap(part, 60))

    def of(name: str, chosen: list[LayerChoice], colour: str, **look: Any) -> dict:
        place = [share(choice) for choice in chosen], [choice.bytes / sbh for choice in chosen]
        return points(
            name, *place, colour, f"%{{customdata}}<br>{hover}", customdata=[said(one) for one in chosen], **look
        )

    def line(name: str, colour: str, symbol: str, *allowed: str) -> dict:
        best = frontier(_choices_of(shape, "recompute", *allowed), share)
        best = [choice for choice in best if share(choice) <= 34]
        look = {"mode": "lines+markers", "line": {"color": colour}, "marker": {"size": 9, "symbol": symbol}}
        return of(name, best, colour, **look)

    lines = {
        "recompute": line("recompute", INK, "circle"),
        "+ offload": line("+ offload", BLUE, "square", "offload"),
        "+ 8 bits": line("+ 8 bits", PURPLE, "triangle-up", "offload", "compress"),
    }
    free = {name: trace["y"][0] for name, trace in lines.items()}
    return chart(
        f"At no cost in matmuls or waiting: {free['recompute']:.0f} sbh by recomputing,<br>"
        f"{free['+ offload']:.0f} with offload at {gigabytes} GB/s, {free['+ 8 bits']:.0f} with 8 bits too",
        [
            of("one set of matmuls", recompute, COMPARED, symbol="circle-open", size=6),
            *lines.values(),
            points(
                "the named modes", added.values(), kept.values(), HELD, f"%{{text}}: {hover}", mode="markers+text",
                text=list(_NAMED),
                textposition="top right", marker={"color": HELD, "symbol": "diamond", "size": 10}, cliponaxis=False,
            ),
        ],
        "Points, percent of time added and sbh saved: "
        + ", ".join(f"{mode} {added[mode]:.2f} and {kept[mode]:.1f}" for mode in _NAMED)
        + "; saved for no matmul and no wait: " + ", ".join(f"{name} {size:.1f}" for name, size in free.items()) + ".",
        xaxis=scale(f"time added by matmuls and copies (%); full, {added['full']:.1f}%, is to the right", -0.1, 4),
        yaxis=scale("saved on the device (sbh)", 0, 1.15 * kept["none"]),
        height=480,
    )  # fmt: skip
