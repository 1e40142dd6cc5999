"""Three ways to share a layer, without the attention core, over t: with the floor, with gathered inputs, with neither."""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.formulas.activations import eq2, eq4, gathered_input_bytes
from actmem_course.show.drawing import Drawing
from actmem_course.show.floor import sizes_of_t
from actmem_course.show.style import BLUE, GREEN, INK, VERMILION, three_digits

GATHERED_FORMS = (
    "tensor parallel, 10 + 24/t",
    "sequence parallel by plain autograd, 4 + 30/t",
    "sequence parallel, 34/t",
)


def coefficients(shape: ModelShape, tensor_parallel_size: int) -> dict[str, float]:
    """Bytes of one layer on one rank divided by sbh, the core's 5as/(ht) left out because all three have it."""
    a, b, h, s = shape.letters()
    t = tensor_parallel_size
    core = 5 * a * s * s * b // t
    sizes = (eq2(shape, t), eq4(shape, t) + gathered_input_bytes(shape, t), eq4(shape, t))
    return {form: (size - core) / (s * b * h) for form, size in zip(GATHERED_FORMS, sizes)}


def gathered_lines(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """Both axes logarithmic: an even split is a straight line, a floor bends it."""
    t, ts = tensor_parallel_size, sizes_of_t(shape)
    points = {size: coefficients(shape, size) for size in ts}
    here = points[t]
    floor, plain, shard = (here[form] for form in GATHERED_FORMS)
    looks = zip(GATHERED_FORMS, (VERMILION, BLUE, GREEN), ("dash", "dot", "solid"), ("diamond", "square", "circle"))
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": form, "x": ts, "y": [points[size][form] for size in ts],
            "line": {"color": colour, "width": 3, "dash": dash},
            "marker": {"size": [14 if size == t else 6 for size in ts], "symbol": symbol, "color": colour, "line": {"color": INK, "width": 1}},
            "hovertemplate": f"<b>{form}</b><br>t = %{{x}}: %{{y:.3g}} sbh<extra></extra>",
        }
        for form, colour, dash, symbol in looks
    ]  # fmt: skip
    return Drawing(
        traces,
        {
            "title": {
                "text": f"At t = {t}: {three_digits(floor)} sbh with the floor, {three_digits(plain)} by plain autograd,<br>{three_digits(shard)} if each rank keeps only its shard"
            },
            "height": 400,
            "xaxis": {
                "type": "log",
                "title": {"text": "ranks that share the layer, t"},
                "tickvals": ts,
                "ticktext": [str(size) for size in ts],
            },
            "yaxis": {
                "type": "log",
                "title": {"text": "one layer without the core, × sbh"},
                "exponentformat": "none",
                "tickvals": [1, 2, 5, 10, 20, 50],
            },
        },
        f"Lines over t: at t = {t} one layer without its attention core keeps {three_digits(floor)} sbh bytes with tensor parallelism, "
        f"{three_digits(plain)} with sequence parallelism by plain autograd, {three_digits(shard)} where each rank keeps its shard and gathers again.",
    )
