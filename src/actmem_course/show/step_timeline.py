"""One training step as blocks of memory: forward pushes what backward will read, backward pops it, recomputation brings it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from actmem.config import ModelShape
from actmem.formulas.activations import layer_rows
from actmem.rows import Row, total
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import FILLS, GREEN, INK, VERMILION, axis_end, axis_unit, size_text
from actmem_course.show.terms import KINDS, term_of


@dataclass(frozen=True)
class Moment:
    """What is held after one change.  held: for each layer the rows that are there; again: they were just recomputed."""

    says: str
    held: tuple[tuple[Row, ...], ...]
    again: bool = False

    @property
    def bytes(self) -> int:
        """Of all layers together."""
        return sum(total(rows) for rows in self.held)


@cache
def training_moments(shape: ModelShape, recompute: str = "none") -> tuple[Moment, ...]:
    """Forward and backward through the shape's layers, one stored tensor at a time, from nothing to nothing.

    Backward takes a layer's tensors in reverse.  Where it needs one that forward dropped, all that the layer
    has dropped is recomputed first.
    """
    whole, kept = layer_rows(shape), {row.term for row in layer_rows(shape, recompute=recompute)}
    held: list[list[Row]] = [[] for _ in range(shape.num_layers)]
    found = [Moment("before forward", _frozen(held))]
    for layer, rows in enumerate(held):
        for row in whole:
            if row.term in kept:
                rows.append(row)
                found.append(Moment(f"forward, layer {layer}: {row.term} is kept", _frozen(held)))
    for layer in reversed(range(shape.num_layers)):
        there = {row.term for row in held[layer]}
        for row in reversed(whole):
            if row.term not in there:
                held[layer] = list(whole[: whole.index(row) + 1])
                there = {one.term for one in held[layer]}
                found.append(
                    Moment(f"backward, layer {layer}: what was dropped is recomputed", _frozen(held), again=True)
                )
            held[layer].pop()
            found.append(Moment(f"backward, layer {layer}: {row.term} is freed", _frozen(held)))
    return tuple(found)


def _frozen(held: Sequence[Sequence[Row]]) -> tuple[tuple[Row, ...], ...]:
    return tuple(map(tuple, held))


def step_timeline(shape: ModelShape, moment: int, recompute: str = "none") -> Drawing:
    """A column of blocks for each layer at one moment, and below them the bytes held over the whole step."""
    moments = training_moments(shape, recompute)
    now = moments[moment]
    sizes = [one.bytes for one in moments]
    most = sum(total(layer_rows(shape)) for _ in range(shape.num_layers))
    unit, unit_name = axis_unit(most)
    again = [place for place, one in enumerate(moments) if one.again]
    return Drawing(
        [*_blocks(now, shape, unit), *_legend(shape), *_curve(sizes, unit, moment, again)],
        {
            "title": {"text": f"{now.says[0].upper()}{now.says[1:]}:<br>{size_text(now.bytes)} held, {size_text(max(sizes))} at the fullest"},
            "barmode": "stack",
            "bargap": 0.25,
            "height": 560,
            "legend": {"traceorder": "normal"},
            "xaxis": {"tickvals": list(range(shape.num_layers)), "ticktext": [f"layer {layer}" for layer in range(shape.num_layers)], "range": [-0.5, shape.num_layers - 0.5], "anchor": "y", "showgrid": False, "ticks": ""},
            "yaxis": {"domain": [0.5, 1], "anchor": "x", "range": [0, axis_end(total(layer_rows(shape)) / unit)], "title": {"text": f"a layer, {unit_name}"}},
            "xaxis2": {"anchor": "y2", "range": [0, len(moments) - 1], "title": {"text": "forward, then backward: one stored tensor at a time"}, "showgrid": False, "showticklabels": False, "ticks": ""},
            "yaxis2": {"domain": [0, 0.36], "anchor": "x2", "range": [0, axis_end(most / unit)], "title": {"text": f"held, {unit_name}"}},
        },
        f"Blocks of memory, {shape.num_layers} layers, recomputation {recompute}, moment {moment} of {len(moments) - 1}: {now.says}; "
        f"{now.bytes:,} bytes held, {max(sizes):,} at the fullest.",
    )  # fmt: skip


def _blocks(now: Moment, shape: ModelShape, unit: int) -> list[dict]:
    """A trace for each of the 15 tensors, with a block in each layer that holds it."""
    there = [{row.term for row in rows} for rows in now.held]
    return [
        {
            "type": "bar",
            "name": row.term,
            "x": list(range(shape.num_layers)),
            "y": [row.bytes / unit if row.term in terms else 0 for terms in there],
            "marker": FILLS[term_of(row).kind].marker(),
            "hovertemplate": f"<b>{row.term}</b>, layer %{{x}}<br>{row.bytes:,} B = {size_text(row.bytes)}<extra></extra>",
            "showlegend": False,
        }
        for row in layer_rows(shape)
    ]


def _legend(shape: ModelShape) -> list[dict]:
    """An empty trace for each kind, in the order of the legends elsewhere."""
    present = {term_of(row).kind for row in layer_rows(shape)}
    return [
        {"type": "bar", "name": kind, "x": [None], "y": [None], "marker": FILLS[kind].marker(), "hoverinfo": "skip"}
        for kind in KINDS
        if kind in present
    ]


def _curve(sizes: Sequence[int], unit: int, now: int, again: Sequence[int]) -> list[dict]:
    places = {"xaxis": "x2", "yaxis": "y2", "type": "scatter", "showlegend": False}
    return [
        {
            **places, "mode": "lines", "name": "held", "x": list(range(len(sizes))), "y": [size / unit for size in sizes],
            "line": {"shape": "hv", "color": GREEN, "width": 2}, "fill": "tozeroy", "hoverinfo": "skip",
        },
        {
            **places, "mode": "markers", "name": "recomputed", "x": list(again), "y": [sizes[place] / unit for place in again],
            "marker": {"color": VERMILION, "size": 9, "symbol": "triangle-up", "line": {"color": INK, "width": 1}},
            "hovertemplate": "recomputed<extra></extra>",
        },
        {
            **places, "mode": "lines+markers", "name": "now", "x": [now, now], "y": [0, sizes[now] / unit],
            "line": {"color": INK, "width": 2}, "marker": {"color": INK, "size": [0, 11]}, "hoverinfo": "skip",
        },
    ]  # fmt: skip
