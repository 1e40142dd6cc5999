"""Table 2 as bars: for each configuration what every rank keeps a copy of, and what the ranks share."""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.formulas.table2 import TABLE2, Configuration
from actmem.rows import Row, total
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import CARD, PURPLE, VERMILION, Fill, axis_end, axis_unit, size_text, three_digits

#: The parts of a bar: their names, in order, and how they look.
PARTS = {
    "attention core": Fill(VERMILION, "/"),
    "the rest, shared by the ranks": Fill(PURPLE, "-"),
    "the rest, whole on every rank": Fill("#555555", "", CARD),
}


def table2_bars(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """Bytes of one layer on one of t ranks in the six configurations of 2205.05198 table 2.

    Raises ConfigError where t cannot share the layer.
    """
    t = tensor_parallel_size
    rows = {configuration.name: _rows(configuration, shape, t) for configuration in TABLE2}
    sums = {name: total(of_one) for name, of_one in rows.items()}
    unit, unit_name = axis_unit(max(sums.values()))
    best = sums["tensor+sequence+selective"]
    a, b, h, s = shape.letters()
    finding = f"at t = {t} a rank keeps {best / sums['none']:.1%} of what one device alone would"
    said = "; ".join(f"{name} {size_text(size)}" for name, size in sums.items())
    axis = Axis(f"one layer on one rank, {unit_name}", axis_end(1.12 * max(sums.values()) / unit), unit)
    return Drawing(
        [_part(part, rows, unit) for part in PARTS] + [_sums(sums, unit, unit_name)],
        {
            "title": {"text": f"With sequence parallelism and selective recomputation,<br>{finding}"},
            "barmode": "stack",
            "bargap": 0.35,
            "height": 460,
            "xaxis": {"title": {"text": axis.title}, "range": [0, axis.end]},
            "yaxis": {"categoryorder": "array", "categoryarray": [c.name for c in TABLE2][::-1]},
            "legend": {"traceorder": "normal"},
        },
        f"Bars of table 2 at s={s}, b={b}, h={h}, a={a}, t={t}: {said}. With sequence parallelism and selective recomputation, {finding}.",
        axis,
    )


def _rows(configuration: Configuration, shape: ModelShape, t: int) -> list[Row]:
    return layer_rows(shape, configuration.parallel(t), configuration.recompute)


def _part_of(row: Row) -> str:
    core, shared, whole = PARTS
    if row.term in CORE_ATTENTION_TERMS:
        return core
    return shared if row.split_by > 1 else whole


def _part(part: str, rows: dict[str, list[Row]], unit: int) -> dict:
    sizes = [sum(row.bytes for row in of_one if _part_of(row) == part) for of_one in rows.values()]
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "x": [size / unit for size in sizes],
        "y": list(rows),
        "marker": PARTS[part].marker(),
        "customdata": [f"{size:,} B = {size_text(size)}" for size in sizes],
        "hovertemplate": f"<b>%{{y}}</b><br>{part}: %{{customdata}}<extra></extra>",
    }


def _sums(sums: dict[str, int], unit: int, unit_name: str) -> dict:
    """The sum of each bar, after its end."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": [size / unit for size in sums.values()],
        "y": list(sums),
        "text": [f" {three_digits(size / unit)} {unit_name}" for size in sums.values()],
        "textposition": "middle right",
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
