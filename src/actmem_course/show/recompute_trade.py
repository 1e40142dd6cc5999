"""What recomputation takes away and what it adds: bytes and FLOPs of one layer, on one scale."""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.formulas.first_stage import selective_saves
from actmem.formulas.flops import layer_overhead
from actmem.rows import total
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLACK, BLUE, CARD, INK, VERMILION, YELLOW, Fill, size_text

KEPT = Fill(BLUE, "", CARD)
CORE = Fill(VERMILION, "/")
_AGAIN = Fill(YELLOW, ".")
WORK = Fill("#BBBBBB", "", BLACK)
_MODES = {"none": "keep everything", "selective": "selective", "full": "full"}


def recompute_trade(shape: ModelShape) -> Drawing:
    """Six bars, each in percent of its own bar without recomputation: three of bytes, three of FLOPs.

    The modes stop at the last tensor that backward reads (``selective`` and ``full``).
    """
    whole = total(layer_rows(shape))
    left = {mode: total(layer_rows(shape, recompute=mode)) for mode in _MODES}
    core = sum(row.bytes for row in layer_rows(shape) if row.term in CORE_ATTENTION_TERMS)
    added = {mode: layer_overhead(shape, mode) for mode in _MODES}
    names = [f"{what}, {name}" for what in ("bytes", "FLOPs") for name in _MODES.values()]
    kept = [100 * (whole - core) / whole, 100 * (whole - core) / whole, 100 * left["full"] / whole]
    traces = [
        _bars(
            "kept for backward",
            names[:3],
            kept,
            KEPT,
            [size_text(size) for size in (whole - core, left["selective"], left["full"])],
        ),
        _bars("attention core, 5as²b", names[:1], [100 * core / whole], CORE, [size_text(core)]),
        _bars("the layer, forward and backward", names[3:], [100.0] * 3, WORK, ["72Bsh² + 12Bs²h"] * 3),
        _bars(
            "run again",
            names[4:],
            [float(100 * added[mode]) for mode in ("selective", "full")],
            _AGAIN,
            [f"+{_percent(added[mode])}" for mode in ("selective", "full")],
            "outside",
        ),
    ]
    a, b, h, s = shape.letters()
    saved = selective_saves(shape)
    return Drawing(
        traces,
        {
            "title": {
                "text": f"s = {s:,}: dropping the attention core frees {float(saved):.0%} of the bytes<br>for {_percent(added['selective'])} more FLOPs; full recomputation costs {_percent(added['full'])}"
            },
            "barmode": "stack",
            "bargap": 0.25,
            "height": 460,
            "xaxis": {
                "title": {"text": "percent of the same without recomputation"},
                "range": [0, 150],
                "ticksuffix": "%",
            },
            "yaxis": {"categoryorder": "array", "categoryarray": names[::-1]},
            "uniformtext": {"mode": "hide", "minsize": 11},
            "legend": {"traceorder": "normal"},
        },
        f"Bars for one layer at s={s}, b={b}, h={h}, a={a}: selective recomputation leaves {size_text(left['selective'])} of "
        f"{size_text(whole)} and adds {_percent(added['selective'])} FLOPs; full recomputation leaves {size_text(left['full'])} "
        f"and adds {_percent(added['full'])}.",
    )


def _percent(share) -> str:
    value = float(100 * share)
    return f"{value:.2f}%" if value < 10 else f"{value:.1f}%"


def _bars(name: str, y: list[str], x: list[float], fill: Fill, text: list[str], where: str = "") -> dict:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": y,
        "x": x,
        "text": text,
        "textposition": where or ["inside" if value >= 12 else "outside" for value in x],
        "textangle": 0,
        "insidetextanchor": "middle",
        "insidetextfont": {"color": fill.text, "size": 13},
        "outsidetextfont": {"color": INK, "size": 13},
        "cliponaxis": False,
        "marker": fill.marker(),
        "hovertemplate": f"<b>{name}</b><br>%{{y}}: %{{x:.2f}}%, %{{text}}<extra></extra>",
    }
