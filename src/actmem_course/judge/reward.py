"""What a lab measures once it is solved: the form of all rewards, and what they count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from actmem.config import ModelShape
from actmem.formulas.communication import Exchange
from actmem_course.judge.kept import kept
from actmem_course.judge.workbench import Bench

#: Who a bar belongs to, and its colour in the terminal.
SIDES = {"formula": "cyan", "measured": "cyan", "yours": "green", "ours": "blue"}
BAR_WIDTH = 30


@dataclass(frozen=True)
class Measure:
    """One quantity.  unit: ``B``, or nothing for a number.  values: by side, see SIDES."""

    name: str
    unit: str
    values: Mapping[str, int]


@dataclass(frozen=True)
class BarsReward:
    """Each quantity as bars: the formula's, the learner's, ours; below them a remark.

    what: in a line, what was measured.  one_scale: bars of one unit can be compared.
    """

    what: str
    measures: tuple[Measure, ...]
    remark: str = ""
    one_scale: bool = False

    def show(self, console: Console) -> None:
        """In the terminal: each bar with its measure's name, whose it is, and its value."""
        lines = []
        for measure in self.measures:
            alike = [other for other in self.measures if other.unit == measure.unit] if self.one_scale else [measure]
            top = max(max(other.values.values()) for other in alike) or 1
            for i, (side, value) in enumerate(measure.values.items()):
                lines.append(("" if i else measure.name, side, value / top, f"{value:,} {measure.unit}".rstrip()))
        names, sides, _, texts = zip(*lines)
        width = max(
            6, min(BAR_WIDTH, console.width - sum(max(map(len, column)) + 1 for column in (names, sides, texts)))
        )
        table = Table.grid(padding=(0, 1))
        for _ in range(4):
            table.add_column(no_wrap=True)
        for i, (name, side, share, text) in enumerate(lines):
            if name and i:
                table.add_row()
            bar = "━" * max(1, round(width * share)) if share else ""
            table.add_row(Text(name), side, Text(bar, style=SIDES[side]), Text(text))
        console.print()
        console.print(Text(self.what, style="bold"))
        console.print(table)
        if self.remark:
            console.print(Text(self.remark))


def sizes_text(shape: ModelShape) -> str:
    """A layer's sizes in the paper's letters."""
    a, b, h, s = shape.letters()
    return f"s={s} b={b} h={h} a={a}"


#: What a reward measures: a function of x and weights.
Piece = tuple[Callable[..., Tensor], Tensor, Sequence[Tensor]]


@dataclass(frozen=True)
class Cost:
    """What one call of a block costs a rank.  exchanged: payload bytes of forward and backward."""

    bytes: int
    collectives: int
    exchanged_bytes: int


def cost(b: Bench, piece: Piece, others: Sequence[Tensor] = ()) -> Cost:
    """What the function keeps and exchanges, forward and backward.  others: as in ``kept``.  Every rank must call it."""
    function, x, weights = piece
    parameters = [w.detach().clone().requires_grad_() for w in weights]
    counted = kept(b, function, x, weights, others).bytes
    with b.watching() as seen:
        y = function(x.detach().clone().requires_grad_(), *parameters)
        y.backward(torch.ones_like(y))
    b.progress()
    return Cost(counted, len(seen.collectives), sum(c.payload_bytes for c in seen.collectives))


def each_compared(
    b: Bench,
    yours: Mapping[str, Piece],
    ours: Mapping[str, Piece],
    formulas: Iterable[int],
    others: Sequence[Tensor] = (),
) -> tuple[Measure, ...]:
    """What each piece keeps.  formulas: the bytes of each, in the order of the pieces."""
    return tuple(
        Measure(
            f"kept, {name}",
            "B",
            {"formula": formula, **{side: cost(b, piece, others).bytes for side, piece in sides.items()}},
        )
        for name, formula in zip(yours, formulas)
        for sides in [{"yours": yours[name], "ours": ours[name]}]
    )


def compared(yours: Cost, ours: Cost, formula_bytes: int, exchanges: Sequence[Exchange]) -> tuple[Measure, ...]:
    """The measures of a block, on this rank.  exchanges: those that the formula has for it."""
    payload, number = sum(e.payload_bytes * e.count for e in exchanges), sum(e.count for e in exchanges)
    rows = [("kept for backward", "B", formula_bytes, "bytes")]
    if exchanges:
        rows += [("exchanged", "B", payload, "exchanged_bytes"), ("collectives", "", number, "collectives")]
    return tuple(
        Measure(name, unit, {"formula": formula, "yours": getattr(yours, field), "ours": getattr(ours, field)})
        for name, unit, formula, field in rows
    )
