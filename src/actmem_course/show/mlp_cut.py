"""How t ranks share the two products of the MLP: by columns then rows, or the wrong way round."""

from __future__ import annotations

from fractions import Fraction

from actmem.config import ConfigError
from actmem_course.show.boxes import RANK_FILLS, WHOLE, Box, box_traces, diagram_layout, label_trace
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import three_digits

COLUMNS_FIRST, ROWS_FIRST = "columns, then rows", "rows, then columns"
ORDERS = (COLUMNS_FIRST, ROWS_FIRST)
#: How many ranks a picture has colours for.
LARGEST = len(RANK_FILLS)

#: Between two matrices, and the narrowest part that a number fits into.
_GAP, _NARROWEST = 1.1, 0.33


def kept_coefficient(order: str, tensor_parallel_size: int) -> Fraction:
    """Bytes that the MLP's two linears and GeLU keep on each rank, divided by sbh (16 bits).

    Columns first: input 2, not cut, GeLU input 8/t, second input 8/t.  Rows first: the input is cut,
    but GeLU needs the complete sum, so its input and its output are not: 2/t + 16.
    """
    t = tensor_parallel_size
    return 2 + Fraction(16, t) if order == COLUMNS_FIRST else Fraction(2, t) + 16


def mlp_cut(tensor_parallel_size: int, order: str = COLUMNS_FIRST) -> Drawing:
    """X A, GeLU, times B, with each rank's part in its colour; hatched: every rank has all of it."""
    t = tensor_parallel_size
    if not 1 <= t <= LARGEST:
        raise ConfigError("tensor_parallel_size", f"this picture has colours for 1 to {LARGEST} ranks, got {t}")
    first = order == COLUMNS_FIRST
    # name, shape in words, width and height in units of h and sb, how it is cut
    tensors = [
        ("X", "[sb, h]", 1.5, 1.4, None if first else "columns"),
        ("A", "[h, 4h]", 4.0, 1.0, "columns" if first else "rows"),
        ("G = GeLU(XA)", "[sb, 4h]", 4.0, 1.4, "columns" if first else None),
        ("B", "[4h, h]", 1.5, 4.0, "rows" if first else "columns"),
        ("Z = GB", "[sb, h]", 1.5, 1.4, "sum" if first else "columns"),
    ]
    boxes: list[Box] = []
    labels = []
    x, middle = 0.4, 3.2
    signs = ("·", "→", "·", "=")
    for number, (name, sizes, width, height, cut) in enumerate(tensors):
        top = middle - height / 2
        boxes += _parts(name, sizes, x, top, width, height, "" if t == 1 and cut != "sum" else cut, t)
        labels += [(x + width / 2, top - 0.55, f"<b>{name}</b>"), (x + width / 2, top - 0.2, sizes)]
        if number < len(signs):
            labels.append((x + width + _GAP / 2, middle, f"<b>{signs[number]}</b>"))
        x += width + _GAP
    coefficient = three_digits(float(kept_coefficient(order, t)))
    exchange = "one sum over the ranks, at the end" if first else "a sum before GeLU, and a gather at the end"
    what = "no exchange inside" if first else "GeLU needs the whole sum"
    title = f"{order.capitalize()}: {what};<br>each of {t} ranks keeps {coefficient} sbh bytes"
    layout = {**diagram_layout(x - _GAP + 0.6, 5.5), "title": {"text": title}, "height": 400}
    return Drawing(
        [*box_traces(boxes), label_trace(labels)],
        layout,
        f"The MLP's two products shared by {t} ranks, cut by {order}: {exchange}. "
        f"The two linears and GeLU keep {coefficient} times sbh bytes on each rank.",
    )


def _parts(
    name: str, sizes: str, x: float, y: float, width: float, height: float, cut: str | None, t: int
) -> list[Box]:
    """The boxes of one matrix: one for each rank's part, or one if all ranks have it."""
    if cut in (None, ""):
        text = "all" if cut is None and t > 1 else ""
        fill = WHOLE if text else RANK_FILLS[0]
        return [
            Box(
                x,
                y,
                width,
                height,
                fill,
                text,
                f"{name} {sizes}: " + ("whole on every rank" if text else "on the only rank"),
            )
        ]
    if cut == "sum":
        return [
            Box(
                x,
                y,
                width,
                height,
                WHOLE if t > 1 else RANK_FILLS[0],
                "Σ" if t > 1 else "",
                f"{name} {sizes}: a partial sum on each rank, added up by f̄",
            )
        ]
    wide, high = (width / t, height) if cut == "columns" else (width, height / t)
    fits = wide >= _NARROWEST and high >= 0.2
    side = (0, 1) if cut == "columns" else (1, 0)
    return [
        Box(
            x + side[1] * rank * wide,
            y + side[0] * rank * high,
            wide,
            high,
            RANK_FILLS[rank],
            str(rank) if fits else "",
            f"{name} {sizes}, cut by {cut}: part of rank {rank}, 1/{t}",
        )
        for rank in range(t)
    ]
