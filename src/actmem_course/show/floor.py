"""What tensor parallelism divides and what it leaves whole: equation 2 over t, and tensor by tensor."""

from __future__ import annotations

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.rows import Row, total
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import BLUE, FILLS, GREEN, INK, VERMILION, axis_end, axis_unit, size_text, three_digits
from actmem_course.show.terms import KINDS, formula_of, term_of

#: Of a logarithmic axis, in any unit of bytes.
STOPS = tuple(step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5))
DIVIDED, _WHOLE = "divided by t", "whole on every rank"


def divided_and_whole(shape: ModelShape, tensor_parallel_size: int) -> tuple[list[Row], list[Row]]:
    """Rows of one layer on one of t ranks: those that shrink with t, and those that do not.

    For t = 1 nothing is cut; the rows are split as for t = a, the largest.
    """
    cut = {row.term for row in layer_rows(shape, Parallel(shape.num_attention_heads)) if row.split_by > 1}
    rows = layer_rows(shape, Parallel(tensor_parallel_size))
    return [row for row in rows if row.term in cut], [row for row in rows if row.term not in cut]


def sizes_of_t(shape: ModelShape) -> list[int]:
    """The powers of two that divide a, 64 at most: the t of the figures."""
    return [t for t in (1, 2, 4, 8, 16, 32, 64) if shape.num_attention_heads % t == 0]


def floor_lines(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """Bytes of one layer on one rank over t: the divided part falls, the floor stays, the sum approaches it."""
    t, ts = tensor_parallel_size, sizes_of_t(shape)
    parts = {size: tuple(map(total, divided_and_whole(shape, size))) for size in ts}
    once, floor = parts[1]
    unit, unit_name = axis_unit(once + floor)
    even = once / floor
    divided = total(divided_and_whole(shape, t)[0])
    lines = [
        _line("together", ts, [sum(parts[size]) for size in ts], unit, INK, "solid"),
        _line("divided by t", ts, [parts[size][0] for size in ts], unit, VERMILION, "dash"),
        _line("the floor, 10sbh", ts, [floor] * len(ts), unit, GREEN, "dot"),
        {
            "type": "scatter", "mode": "markers", "name": "together at this t", "showlegend": False,
            "x": [t], "y": [(divided + floor) / unit],
            "marker": {"size": 14, "color": BLUE, "symbol": "diamond", "line": {"color": INK, "width": 1.5}},
            "hovertemplate": f"t = {t}: {divided + floor:,} B<extra></extra>",
        },
    ]  # fmt: skip
    ideal = (once + floor) / t
    return Drawing(
        lines,
        {
            "title": {
                "text": f"{t} ranks: {three_digits((divided + floor) / ideal)} times what an even share would be;<br>from t = {three_digits(even)} on the floor is the larger part"
            },
            "height": 380,
            "xaxis": {
                "type": "log",
                "title": {"text": "ranks that share the layer, t"},
                "tickvals": ts,
                "ticktext": [str(size) for size in ts],
            },
            "yaxis": {
                "type": "log",
                "title": {"text": f"one layer on one rank, {unit_name}"},
                "tickvals": STOPS,
                "ticktext": [f"{stop:g}" for stop in STOPS],
            },
        },
        f"Lines over t, both axes logarithmic: the divided part falls from {size_text(once)} as 1/t, the floor stays at {size_text(floor)}, "
        f"they are equal at t = {three_digits(even)}; at t = {t} a rank keeps {divided + floor:,} bytes, "
        f"{three_digits((divided + floor) / ideal)} times a t-th of the layer.",
    )


def floor_bars(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """The two parts at one t, a segment for each stored tensor."""
    t = tensor_parallel_size
    divided, whole = divided_and_whole(shape, t)
    floor, rest = total(whole), total(divided)
    unit, unit_name = axis_unit(max(floor, rest))
    traces = [_segment(row, name, shape, unit) for name, rows in ((DIVIDED, divided), (_WHOLE, whole)) for row in rows]
    present = {term_of(row).kind for row in divided + whole}
    traces += [
        {
            "type": "bar",
            "name": kind,
            "x": [None],
            "y": [None],
            "orientation": "h",
            "marker": FILLS[kind].marker(),
            "hoverinfo": "skip",
        }
        for kind in KINDS
        if kind in present
    ]
    a, b, h, s = shape.letters()
    share = f"{floor / (floor + rest):.0%}"
    axis = Axis(f"kept for backward on each rank, {unit_name}", axis_end(max(floor, rest) / unit), unit)
    return Drawing(
        traces,
        {
            "title": {
                "text": f"At t = {t} each rank keeps {size_text(floor + rest)} of a layer;<br>{share} of it is the floor, {size_text(floor)} for every t"
            },
            "barmode": "stack",
            "bargap": 0.35,
            "height": 380,
            "xaxis": {"title": {"text": axis.title}, "range": [0, axis.end]},
            "yaxis": {"categoryorder": "array", "categoryarray": [_WHOLE, DIVIDED], "tickfont": {"size": 14}},
            "uniformtext": {"mode": "hide", "minsize": 11},
            "legend": {"traceorder": "normal"},
        },
        f"Two stacked bars at s={s}, b={b}, h={h}, a={a}, t={t}: {rest:,} bytes are divided by t, {floor:,} bytes are whole on every rank, "
        f"{share} of the two together.",
        axis,
    )


def _line(name: str, ts: list[int], sizes: list[int], unit: int, colour: str, dash: str) -> dict:
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": list(ts), "y": [size / unit for size in sizes],
        "customdata": [f"{size:,} B = {size_text(size)}" for size in sizes],
        "line": {"color": colour, "width": 3, "dash": dash}, "marker": {"size": 6},
        "hovertemplate": f"<b>{name}</b><br>t = %{{x}}: %{{customdata}}<extra></extra>",
    }  # fmt: skip


def _segment(row: Row, bar: str, shape: ModelShape, unit: int) -> dict:
    formula, fill = formula_of(row, shape), FILLS[term_of(row).kind]
    return {
        "type": "bar", "orientation": "h", "name": row.term, "x": [row.bytes / unit], "y": [bar], "marker": fill.marker(),
        "text": [formula], "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "insidetextfont": {"color": fill.text, "size": 13}, "showlegend": False,
        "hovertemplate": f"<b>{row.term}</b>  {formula}<br>{row.bytes:,} B = {size_text(row.bytes)}<extra></extra>",
    }  # fmt: skip
