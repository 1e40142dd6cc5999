"""What a learner's code keeps, exchanges and takes, beside the formula and beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

#: Who a bar belongs to, and its colour in the terminal.
SIDES = {"formula": "cyan", "measured": "cyan", "yours": "green", "ours": "blue"}
BAR_WIDTH = 30


@dataclass(frozen=True)
class Measure:
    """One quantity.  unit: ``B``, ``ms``, or nothing for a number.  values: by side, see SIDES."""

    name: str
    unit: str
    values: dict[str, float]


@dataclass(frozen=True)
class Reward:
    """All that was measured.  what: in a line, of what.  remark: what to take home from it.

    one_scale: bars of one unit can be compared.
    """

    what: str
    measures: tuple[Measure, ...]
    remark: str = ""
    one_scale: bool = False


def amount(value: float, unit: str) -> str:
    """A value with its unit: whole numbers in full."""
    number = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    return f"{number} {unit}".rstrip()


def show(reward: Reward, console: Console) -> None:
    """Bars in the terminal, each quantity to its own scale unless they share one."""
    console.print()
    console.print(Text(reward.what, style="bold"))
    table = Table.grid(padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for measure in reward.measures:
        alike = [other for other in reward.measures if other.unit == measure.unit] if reward.one_scale else [measure]
        top = max(max(other.values.values()) for other in alike) or 1
        for i, (side, value) in enumerate(measure.values.items()):
            bar = Text("━" * max(1, round(BAR_WIDTH * value / top)) if value else "", style=SIDES[side])
            text = amount(value, measure.unit)
            if measure.unit == "ms" and side == "yours" and "ours" in measure.values:
                text += f", {value / measure.values['ours']:.2f} of ours"
            table.add_row(Text("" if i else measure.name), side, bar, Text(text))
        table.add_row()
    console.print(table)
    if reward.remark:
        console.print(Text(reward.remark))


def write_html(reward: Reward, path: Path) -> None:
    """The same as a page of its own."""
    from plotly.subplots import make_subplots  # only to draw

    figure = make_subplots(rows=len(reward.measures), cols=1, subplot_titles=[f"{m.name}, {m.unit}" for m in reward.measures])
    for row, measure in enumerate(reward.measures, 1):
        values = measure.values
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


def costs(b: Bench, functions: Mapping[str, Callable[..., Tensor]], x: Tensor, weights: Sequence[Tensor], rounds: int = 15) -> dict[str, Cost]:
    """Count and time each ``function(x, *weights)``, forward and backward.  Every rank must call it.

    The functions take turns, and the fastest round counts: what else a machine does only adds time.
    """
    parameters = [w.detach().clone().requires_grad_() for w in weights]

    def once(function: Callable[..., Tensor]) -> float:
        b.gather(None)  # all ranks begin together
        start = time.perf_counter()
        y = function(x.detach().clone().requires_grad_(), *parameters)
        y.backward(torch.ones_like(y))
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        b.progress()
        return 1000 * (time.perf_counter() - start)

    counted, seen = {}, {}
    for name, function in functions.items():
        counted[name] = kept(b, function, x, weights).bytes
        with b.watching() as seen[name]:
            once(function)
    with one_thread():
        turns = [{name: once(function) for name, function in functions.items()} for _ in range(rounds + 1)][1:]
    return {
        name: Cost(
            counted[name],
            len(seen[name].collectives),
            sum(c.payload_bytes for c in seen[name].collectives),
            min(turn[name] for turn in turns),
        )
        for name in functions
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrix products on one core each: threads that wait for a busy core would be timed instead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compared(yours: Cost, ours: Cost, formula_bytes: int, exchanges: Sequence[Exchange]) -> tuple[Measure, ...]:
    """The measures of a block, on this rank.  exchanges: those that the formula has for it."""
    payload = sum(exchange.payload_bytes * exchange.count for exchange in exchanges)
    measures = [Measure("kept for backward", "B", {"formula": formula_bytes, "yours": yours.bytes, "ours": ours.bytes})]
    if exchanges:
        number = sum(exchange.count for exchange in exchanges)
        exchanged = {"formula": payload, "yours": yours.exchanged_bytes, "ours": ours.exchanged_bytes}
        measures.append(Measure("exchanged", "B", exchanged))
        measures.append(Measure("collectives", "", {"formula": number, "yours": yours.collectives, "ours": ours.collectives}))
    return (*measures, times(yours, ours))


def times(yours: Cost, ours: Cost) -> Measure:
    """How long a forward and a backward took."""
    return Measure("forward + backward", "ms", {"yours": yours.milliseconds, "ours": ours.milliseconds})
