"""What a FLOP buys: bytes rebuilt for each FLOP of running a part of the layer again."""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.formulas.rebuild import Rebuild, core_over_gelu, rebuilds
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import FILLS, axis_end, size_text, three_digits

_KIND = {
    "Q, K, V": "Q, K, V",
    "attention core": "softmax",
    "attention output": "input of a linear",
    "middle of the layer": "layer-norm input",
    "GeLU input": "GeLU input",
}


def rebuild_price(shape: ModelShape) -> Drawing:
    """A bar for each group of tensors that takes a matrix product to rebuild, the most expensive at the bottom.

    Groups that need none have no such price; the table next to the figure names them.
    """
    priced = sorted(
        ((r, r.bytes_per_flop) for r in rebuilds(shape) if r.bytes_per_flop), key=lambda pair: pair[1], reverse=True
    )
    values = [float(1000 * price) for _, price in priced]
    a, b, h, s = shape.letters()
    times = core_over_gelu(shape)
    axis = Axis("bytes given back for 1,000 FLOPs", axis_end(1.12 * max(values)))
    return Drawing(
        [_bar(r, value) for (r, _), value in zip(priced, values)],
        {
            "title": {
                "text": f"A FLOP in the attention core gives back {float(times):,.0f} times<br>the bytes of a FLOP in h→4h: 5a/2, with a = {a:,}"
            },
            "xaxis": {"title": {"text": axis.title}, "range": [0, axis.end]},
            "yaxis": {"categoryorder": "array", "categoryarray": [r.name for r, _ in priced][::-1]},
            "height": 360,
            "margin": {"b": 60},
        },
        f"Bars at s={s}, b={b}, h={h}, a={a}, bytes given back for 1,000 FLOPs: "
        + ", ".join(f"{r.name} {three_digits(value)}" for (r, _), value in zip(priced, values))
        + ".",
        axis,
    )


def _bar(r: Rebuild, value: float) -> dict:
    return {
        "type": "bar",
        "orientation": "h",
        "name": r.name,
        "y": [r.name],
        "x": [value],
        "text": [three_digits(value)],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": FILLS[_KIND[r.name]].marker(),
        "hovertemplate": f"<b>{r.name}</b><br>{_hover(r)}<extra></extra>",
        "showlegend": False,
    }


def _hover(r: Rebuild) -> str:
    return f"{size_text(r.bytes)} for {r.flops / 10**9:,.1f} GFLOP<br>made again by {r.how}"
