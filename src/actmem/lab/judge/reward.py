"""What a learner's code keeps, exchanges and takes, beside the formula and beside ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from actmem.formulas.communication import Exchange
from actmem.lab.judge.bench import Bench
from actmem.lab.judge.kept import kept

#: Who a bar belongs to, in the order in which they are drawn, and its colour in the terminal.
SIDES = {"formula": "cyan", "yours": "green", "ours": "blue"}
BAR_WIDTH = 30


@dataclass(frozen=True)
class Measure:
    """One quantity.  formula: None where there is none (times).  unit: ``B``, ``ms``, or what is counted."""

    name: str
    unit: str
    formula: int | None
    yours: float
    ours: float

    def values(self) -> dict[str, float]:
        """The sides that have a value."""
        sides = {"formula": self.formula, "yours": self.yours, "ours": self.ours}
        return {side: value for side, value in sides.items() if value is not None}


@dataclass(frozen=True)
class Reward:
    """All that was measured.  what: in a line, of what.  remark: what to take home from it."""

    what: str
    measures: tuple[Measure, ...]
    remark: str = ""


def amount(value: float, unit: str) -> str:
    """A value with its unit: whole numbers in full."""
    number = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    return f"{number} {unit}".rstrip()


def show(reward: Reward, console: Console) -> None:
    """Bars in the terminal, each quantity to its own scale."""
    console.print()
    console.print(Text(reward.what, style="bold"))
    table = Table.grid(padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for measure in reward.measures:
        top = max(measure.values().values()) or 1
        for i, (side, value) in enumerate(measure.values().items()):
            bar = Text("━" * max(1, round(BAR_WIDTH * value / top)) if value else "", style=SIDES[side])
            table.add_row(Text("" if i else measure.name), side, bar, Text(amount(value, measure.unit), justify="right"))
        table.add_row()
    console.print(table)
    if reward.remark:
        console.print(Text(reward.remark))


def write_html(reward: Reward, path: Path) -> None:
    """The same as a page of its own."""
    from plotly.subplots import make_subplots  # only to draw

    figure = make_subplots(rows=len(reward.measures), cols=1, subplot_titles=[f"{m.name}, {m.unit}" for m in reward.measures])
    for row, measure in enumerate(reward.measures, 1):
        values = measure.values()
        texts = [amount(value, measure.unit) for value in values.values()]
        figure.add_bar(x=list(values.values()), y=list(values), text=texts, orientation="h", row=row, col=1)
        figure.update_yaxes(autorange="reversed", row=row, col=1)
    figure.update_layout(title=reward.what, showlegend=False, height=140 + 170 * len(reward.measures))
    figure.write_html(path, include_plotlyjs=True)


@dataclass(frozen=True)
class Cost:
    """What one call of a block costs a rank.  exchanged: payload bytes of forward and backward."""

    bytes: int
    collectives: int
    exchanged_bytes: int
    milliseconds: float


def cost(b: Bench, function: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor], repeats: int = 7) -> Cost:
    """Count and time ``function(x, *weights)``, forward and backward.  Every rank must call it."""
    counted = kept(b, function, x, weights).bytes
    parameters = [w.detach().clone().requires_grad_() for w in weights]

    def once() -> None:
        y = function(x.detach().clone().requires_grad_(), *parameters)
        y.backward(torch.ones_like(y))

    with b.watching() as seen:
        once()
    times = []
    for _ in range(repeats):
        b.gather(None)  # all ranks begin together
        start = time.perf_counter()
        once()
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        b.progress()
    exchanged = sum(c.payload_bytes for c in seen.collectives)
    return Cost(counted, len(seen.collectives), exchanged, 1000 * statistics.median(times))


def compared(yours: Cost, ours: Cost, formula_bytes: int, exchanges: Sequence[Exchange]) -> tuple[Measure, ...]:
    """The measures of a block, on this rank.  exchanges: those that the formula has for it."""
    payload = sum(exchange.payload_bytes * exchange.count for exchange in exchanges)
    measures = [Measure("kept for backward", "B", formula_bytes, yours.bytes, ours.bytes)]
    if exchanges:
        number = sum(exchange.count for exchange in exchanges)
        measures.append(Measure("exchanged", "B", payload, yours.exchanged_bytes, ours.exchanged_bytes))
        measures.append(Measure("in how many collectives", "", number, yours.collectives, ours.collectives))
    return (*measures, Measure("forward + backward", "ms", None, yours.milliseconds, ours.milliseconds))
