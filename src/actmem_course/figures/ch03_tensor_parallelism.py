"""Chapter 3: which saved tensors tensor parallelism shards, which it doesn't, and how MLP and QKV are sharded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log10

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.rows import Row, total
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing, chart, line, log_scale
from actmem_course.figures.operators import COMPLETE, PARTIAL
from actmem_course.figures.style import BLUE, COMPARED, FILLS, INK
from actmem_course.figures.units import axis_unit, exact_text, size_text, three_digits

#: Ticks of a logarithmic axis, in any unit of bytes.
STOPS = tuple(step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5))
COLUMNS_FIRST, ROWS_FIRST = "columns, then rows", "rows, then columns"
ORDERS = (COLUMNS_FIRST, ROWS_FIRST)
#: The most ranks whose shards are drawn.
LARGEST = 8
#: The gap between two matrices, and the narrowest shard that a number fits into.
_GAP, _NARROWEST = 0.9, 0.45


def divided_and_whole(shape: ModelShape, tensor_parallel_size: int) -> tuple[list[Row], list[Row]]:
    """Return what one layer saves on one of t ranks, in two lists: rows that tensor parallelism shards, and other rows.

    For t = 1, where nothing is sharded, the first list has the rows that a larger t would shard.

    Args:
        shape: The layer's sizes.
        tensor_parallel_size: t.
    """
    sharded = {row.term for row in layer_rows(shape, Parallel(shape.num_attention_heads)) if row.split_by > 1}
    rows = layer_rows(shape, Parallel(tensor_parallel_size))
    return [row for row in rows if row.term in sharded], [row for row in rows if row.term not in sharded]


def sizes_of_t(shape: ModelShape) -> list[int]:
    """Return the values of t that the figures show: powers of two up to 64 that divide the number of heads."""
    return [t for t in (1, 2, 4, 8, 16, 32, 64) if shape.num_attention_heads % t == 0]


def floor_lines(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """Draw three lines over t: the bytes that one layer saves on one rank, their sharded part, and the rest.

    The sharded part falls as 1/t. The rest is the same on every rank: a floor that the sum approaches.

    Args:
        shape: The layer's sizes.
        tensor_parallel_size: The t at which the lines end.
    """
    t = tensor_parallel_size
    parts = {size: tuple(map(total, divided_and_whole(shape, size))) for size in sizes_of_t(shape)}
    once, floor = parts[1]
    here, even = sum(parts[t]), once / floor
    times = three_digits(here / ((once + floor) / t))
    drawn = [size for size in parts if size <= t]
    return lines_over_t(
        f"{t} {'ranks' if t > 1 else 'rank'}: each saves {times} times an even share;<br>from {ceil(even)} ranks on "
        "most of it is the same on every rank",
        [
            Curve("saved on one rank", {size: sum(parts[size]) for size in drawn}, INK, "solid"),
            Curve("divided by t", {size: parts[size][0] for size in drawn}, BLUE, "dash"),
            Curve("the same on every rank", dict.fromkeys(drawn, floor), COMPARED, "dot"),
        ],
        f"the divided part falls from {size_text(once)} as 1/t, the part that is the same on every rank stays at "
        f"{size_text(floor)}, they are equal at t = {three_digits(even)}; at t = {t} a rank saves {here:,} bytes, "
        f"{times} times a t-th of the layer",
        t, list(parts), (min(*parts[max(parts)]), once + floor),
    )  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A line over t, the number of ranks that share a layer.

    Attributes:
        name: The line's name in the legend.
        sizes: For each t the line's bytes.
        colour: A CSS colour.
        dash: Plotly's name of a line style, such as "dot".
    """

    name: str
    sizes: dict[int, int]
    colour: str
    dash: str


def lines_over_t(
    title: str, curves: Iterable[Curve], alt: str, t: int, ts: Sequence[int], ends: tuple[int, int]
) -> Drawing:
    """Draw what one rank saves for a layer over t, with both axes logarithmic.

    An even split is a straight line; a part that isn't divided bends it. The points at ``t`` are larger than the
    others.

    Args:
        title: The finding.
        curves: The lines, each with its bytes at all of ``ts``.
        alt: The alt text: the finding with its numbers.
        t: The t that the reader has chosen.
        ts: All values of t on the x axis.
        ends: The fewest and the most bytes on the y axis.
    """
    unit, unit_name = axis_unit(ends[0])
    traces = [
        line(
            curve.name, curve.sizes, [size / unit for size in curve.sizes.values()], curve.colour,
            f"<b>{curve.name}</b><br>t = %{{x}}: %{{customdata}}", curve.dash, symbol="circle",
            size=[14 if size == t else 6 for size in curve.sizes],
            customdata=list(map(exact_text, curve.sizes.values())),
        )
        for curve in curves
    ]  # fmt: skip
    low, high = (log10(size / unit) for size in ends)
    return chart(
        title,
        traces,
        f"Lines over t, both axes logarithmic: {alt}.",
        height=380,
        xaxis=log_scale(
            "ranks that share the layer, t (logarithmic)", ts, map(str, ts), range=[-0.1, log10(ts[-1]) + 0.1]
        ),
        yaxis=log_scale(
            f"saved (logarithmic), {unit_name}", STOPS, map("{:g}".format, STOPS), range=[low - 0.1, high + 0.1]
        ),
    )


def saved_coefficient(order: str, tensor_parallel_size: int) -> Fraction:
    """Return the bytes that the MLP's two linears and GeLU save on each rank in 16 bits, divided by sbh.

    With columns first it is 2 + 8/t + 8/t: for the unsharded input, GeLU's input and the second linear's input.
    With rows first it is 2/t + 16: the first input is sharded, but GeLU needs the sum over all ranks, so GeLU's input
    and output are not sharded.

    Args:
        order: How the first and then the second weight is sharded: COLUMNS_FIRST or ROWS_FIRST.
        tensor_parallel_size: t.
    """
    t = tensor_parallel_size
    return 2 + Fraction(16, t) if order == COLUMNS_FIRST else Fraction(2, t) + 16


def mlp_shards(tensor_parallel_size: int, order: str = COLUMNS_FIRST) -> Drawing:
    """Draw the matrices of an MLP (X times A, GeLU, times B) as they are sharded among t ranks.

    Rank 0's shard of each matrix is filled, the other ranks' shards are frames.

    Args:
        tensor_parallel_size: t.
        order: How A and then B are sharded: COLUMNS_FIRST or ROWS_FIRST.

    Raises:
        ConfigError: There are more than LARGEST ranks.
    """
    t = tensor_parallel_size
    if not 1 <= t <= LARGEST:
        raise ConfigError("tensor_parallel_size", f"this picture has room for 1 to {LARGEST} ranks, got {t}")
    first = order == COLUMNS_FIRST
    activation, weight = FILLS["input of a linear"], FILLS["weights"]
    # name, shape in words, width and height in units of h and sb, how it is sharded, its colour
    tensors = [
        ("X", "[sb, h]", 2.0, 1.4, None if first else "columns", activation),
        ("A", "[h, 4h]", 4.0, 1.0, "columns" if first else "rows", weight),
        ("G = GeLU(XA)", "[sb, 4h]", 4.0, 1.4, "columns" if first else None, activation),
        ("B", "[4h, h]", 2.0, 4.0, "rows" if first else "columns", weight),
        ("Z = GB", "[sb, h]", 2.0, 1.4, "sum" if first else "columns", PARTIAL if first else COMPLETE),
    ]
    drawn: list[Box] = []
    words = []
    x, middle = 0.4, 3.2
    for (name, sizes, width, height, split, fill), sign in zip(tensors, ("·", "→", "·", "=", "")):
        top = middle - height / 2
        drawn += _shards(f"{name} {sizes}", Box(x, top, width, height, fill), split, t)
        words += [(x + width / 2, top - 0.55, f"<b>{name}</b>"), (x + width / 2, top - 0.2, sizes)]
        if sign:
            words.append((x + width + _GAP / 2, middle, f"<b>{sign}</b>"))
        x += width + _GAP
    coefficient = three_digits(float(saved_coefficient(order, t)))
    collectives = "one sum over the ranks, at the end" if first else "a sum before GeLU, and a gather at the end"
    finding = "no collective inside" if first else "GeLU waits for the whole sum"
    return diagram(
        f"{order.capitalize()}: {finding};<br>each of {t} ranks saves {coefficient} sbh bytes",
        [*boxes(drawn), labels(words)],
        f"The MLP's two matmuls shared by {t} ranks, sharded by {order}: {collectives}. "
        f"The two linears and GeLU save {coefficient} times sbh bytes on each rank.",
        x - _GAP + 0.6, 5.5, 400,
    )  # fmt: skip


def _shards(name: str, whole: Box, split: str | None, t: int) -> list[Box]:
    """Return the boxes of one matrix: one for each rank's shard, or a single one if all ranks have the whole."""
    x, y, width, height = whole.x, whole.y, whole.width, whole.height
    if split == "sum":
        hover = f"{name}: partial on each rank, added up by f̄"
        return [Box(x, y, width, height, whole.fill, "Σ" if t > 1 else "", hover)]
    if split is None or t == 1:
        shared = split is None and t > 1
        where = "whole on every rank" if shared else "on the only rank"
        return [Box(x, y, width, height, whole.fill, "all" if shared else "", f"{name}: {where}")]
    across = split == "columns"
    wide, high = (width / t, height) if across else (width, height / t)
    fits = wide >= _NARROWEST and high >= 0.2
    return [
        Box(
            x + across * rank * wide, y + (not across) * rank * high, wide, high, EMPTY if rank else whole.fill,
            str(rank) if fits else "", f"{name}, sharded by {split}: rank {rank}'s, 1/{t}",
        )
        for rank in range(t)
    ]  # fmt: skip
