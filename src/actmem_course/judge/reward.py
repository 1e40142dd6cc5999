"""What a lab measures once it is solved: the form of all rewards, and the one that is bars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actmem.config import ModelShape

#: Who a bar belongs to, and its colour in the terminal.
SIDES = {"formula": "cyan", "measured": "cyan", "yours": "green", "ours": "blue"}
BAR_WIDTH = 30


@dataclass(frozen=True)
class Reward(ABC):
    """A table and a few lines below it.  what: in a line, what was measured."""

    what: str

    def show(self, console: Console) -> None:
        """In the terminal."""
        console.print()
        console.print(Text(self.what, style="bold"))
        console.print(self.table(console.width))
        for line in self.lines():
            console.print(Text(line))

    @abstractmethod
    def table(self, width: int) -> Table:
        """The numbers, for a terminal of so many columns."""

    @abstractmethod
    def lines(self) -> list[str]:
        """What the numbers say, in sentences."""

    @abstractmethod
    def write_html(self, path: Path) -> None:
        """The same as a page of its own."""


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
class BarsReward(Reward):
    """Each quantity as bars: the formula's, the learner's, ours.  one_scale: bars of one unit can be compared."""

    measures: tuple[Measure, ...]
    remark: str = ""
    one_scale: bool = False

    def table(self, width: int) -> Table:
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
