"""What a lab measures once it is solved: the form of all rewards, and what they count and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
    """One quantity.  unit: ``B``, ``ms``, or nothing for a number.  values: by side, see SIDES.

    noise: of a time, by which share a median round is slower than the fastest, which is shown.
    """

    name: str
    unit: str
    values: Mapping[str, float]
    noise: float = 0.0


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
        """In the terminal."""
        console.print()
        console.print(Text(self.what, style="bold"))
        console.print(self.table(console.width))
        for line in self.lines():
            console.print(Text(line))

    def table(self, width: int) -> Table:
        """The numbers, for a terminal of so many columns."""
        lines = list(self._lines())
        names, sides, _, _, texts = zip(*lines)
        others = (max(map(len, column)) + 1 for column in (names, sides, texts))
        width = max(6, min(BAR_WIDTH, width - sum(others)))
        table = Table.grid(padding=(0, 1))
        for _ in range(4):
            table.add_column(no_wrap=True)
        for i, (name, side, value, top, text) in enumerate(lines):
            if name and i:
                table.add_row()
            table.add_row(Text(name), side, bar(value, top, SIDES[side], width), Text(text))
        return table

    def lines(self) -> list[str]:
        """What the numbers say, in sentences."""
        noise = max((measure.noise for measure in self.measures), default=0.0)
        said = f"Times are those of the fastest round; a median one took up to {noise:.0%} longer."
        return [self.remark] * bool(self.remark) + [said] * (noise > 0)

    def _lines(self) -> Iterator[tuple[str, str, float, float, str]]:
        """Each bar: its measure's name, on the first; whose it is; its value; the longest bar's; words behind it."""
        for measure in self.measures:
            alike = [other for other in self.measures if other.unit == measure.unit] if self.one_scale else [measure]
            top = max(max(other.values.values()) for other in alike) or 1
            for i, (side, value) in enumerate(measure.values.items()):
                text = amount(value, measure.unit)
                if measure.unit == "ms" and side == "yours" and "ours" in measure.values:
                    text += f", {value / measure.values['ours']:.2f} of ours"
                yield "" if i else measure.name, side, value, top, text

    def write_html(self, path: Path) -> None:
        """The same as a page of its own."""
        from plotly.subplots import make_subplots  # only to draw

        titles = [f"{m.name}, {m.unit}" if m.unit else m.name for m in self.measures]
        figure = make_subplots(rows=len(self.measures), cols=1, subplot_titles=titles)
        for row, measure in enumerate(self.measures, 1):
            values = measure.values
            texts = [amount(value, measure.unit) for value in values.values()]
            figure.add_bar(x=list(values.values()), y=list(values), text=texts, orientation="h", row=row, col=1)
            figure.update_yaxes(autorange="reversed", row=row, col=1)
        figure.update_layout(title=self.what, showlegend=False, height=140 + 170 * len(self.measures))
        figure.write_html(path, include_plotlyjs=True)


def sizes_text(shape: ModelShape) -> str:
    """A layer's sizes in the paper's letters."""
    a, b, h, s = shape.letters()
    return f"s={s} b={b} h={h} a={a}"


def amount(value: float, unit: str) -> str:
    """A value with its unit: whole numbers in full."""
    number = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    return f"{number} {unit}".rstrip()


def bar(value: float, top: float, style: str, width: int = BAR_WIDTH) -> Text:
    """A bar as long as value's share of ``top``; nothing for zero."""
    return Text("━" * max(1, round(width * value / top)) if value else "", style=style)


#: What a reward measures: a function of x and weights.
Piece = tuple[Callable[..., Tensor], Tensor, Sequence[Tensor]]
_SECONDS, _FEWEST_ROUNDS, _MOST_ROUNDS = 4.0, 3, 15


@dataclass(frozen=True)
class Cost:
    """What one call of a block costs a rank.  exchanged: payload bytes of forward and backward.

    milliseconds: of the fastest round.  noise: by which share of it the median round is slower.
    """

    bytes: int
    collectives: int
    exchanged_bytes: int
    milliseconds: float
    noise: float = 0.0


def costs(
    b: Bench,
    functions: Mapping[str, Callable[..., Tensor]],
    x: Tensor,
    weights: Sequence[Tensor],
    others: Sequence[Tensor] = (),
) -> dict[str, Cost]:
    """Count and time each ``function(x, *weights)``, forward and backward.  others: as in ``kept``.  Every rank must call it.

    The functions take turns, and the fastest round counts: what else a machine does only adds time.
    There are as many rounds as a few seconds have room for.
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
        counted[name] = kept(b, function, x, weights, others).bytes
        with b.watching() as seen[name]:
            once(function)
    with one_thread():
        turns: list[dict[str, float]] = []
        start = time.perf_counter()
        while (
            len(turns) <= _FEWEST_ROUNDS
            or len(turns) <= _MOST_ROUNDS
            and max(b.gather(time.perf_counter() - start)) < _SECONDS
        ):
            turns.append({name: once(function) for name, function in functions.items()})
            b.progress(f"round {len(turns)}")
        del turns[0]  # the first warms up
    return {
        name: Cost(
            counted[name],
            len(seen[name].collectives),
            sum(c.payload_bytes for c in seen[name].collectives),
            min(turn[name] for turn in turns),
            median(turn[name] for turn in turns) / min(turn[name] for turn in turns) - 1,
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


def each_compared(
    b: Bench,
    yours: Mapping[str, Piece],
    ours: Mapping[str, Piece],
    formulas: Iterable[int],
    others: Sequence[Tensor] = (),
) -> list[Measure]:
    """What each piece keeps, and how long it takes.  formulas: the bytes of each, in the order of the pieces."""
    measures = []
    for (name, (function, x, weights)), formula in zip(yours.items(), formulas):
        found = costs(b, {"yours": function, "ours": ours[name][0]}, x, weights, others)
        kept_bytes = {side: cost.bytes for side, cost in found.items()}
        measures += [Measure(f"kept, {name}", "B", {"formula": formula, **kept_bytes}), time_measure(found)]
    return measures


def compared(found: Mapping[str, Cost], formula_bytes: int, exchanges: Sequence[Exchange]) -> tuple[Measure, ...]:
    """The measures of a block, on this rank, of the costs of "yours" and "ours".  exchanges: those that the formula has for it."""
    payload, number = sum(e.payload_bytes * e.count for e in exchanges), sum(e.count for e in exchanges)
    sides = {side: found[side] for side in ("yours", "ours")}
    measures = [Measure("kept for backward", "B", {"formula": formula_bytes} | {s: c.bytes for s, c in sides.items()})]
    if exchanges:
        sent = {"formula": payload} | {side: cost.exchanged_bytes for side, cost in sides.items()}
        often = {"formula": number} | {side: cost.collectives for side, cost in sides.items()}
        measures += [Measure("exchanged", "B", sent), Measure("collectives", "", often)]
    return (*measures, time_measure(sides))


def time_measure(found: Mapping[str, Cost]) -> Measure:
    """How long a forward and a backward took."""
    times = {side: cost.milliseconds for side, cost in found.items()}
    return Measure("forward + backward", "ms", times, max(cost.noise for cost in found.values()))
