"""Modes side by side: what each keeps, how long a step takes, how its loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from actmem_course.judge.reward import Reward, amount, bar
from actmem_course.results import ModeCost
from actmem_course.show.tables import sparkline

#: Columns of a terminal line that a bar, or a curve, may take.
BYTES_WIDTH, TIME_WIDTH, CURVE_WIDTH = 9, 6, 12


@dataclass(frozen=True)
class ModesReward(Reward):
    """All modes of one training, a line each.  note: how it was measured."""

    modes: tuple[ModeCost, ...]
    note: str = ""

    def table(self, width: int) -> Table:
        most_bytes, longest = max(m.kept_bytes for m in self.modes), max(m.step_seconds for m in self.modes)
        table = Table.grid(padding=(0, 1))
        for justify in ("left", "right", "left", "right", "left", "left"):
            table.add_column(no_wrap=True, justify=justify)
        head = ("mode", "kept", "", "a step", "", "loss")
        table.add_row(*(Text(word, style="dim") for word in head))
        for mode in self.modes:
            table.add_row(
                Text(mode.name),
                Text(amount(mode.kept_bytes, "B")),
                bar(mode.kept_bytes, most_bytes, "green", BYTES_WIDTH),
                Text(amount(1000 * mode.step_seconds, "ms")),
                bar(mode.step_seconds, longest, "blue", TIME_WIDTH),
                Text(curve(mode.losses)),
            )
        return table

    def lines(self) -> list[str]:
        off = [mode for mode in self.modes if mode.kept_bytes != mode.formula_bytes]
        lines = [f"{mode.name}: {mode.formula_bytes:,} B by formula, {mode.kept_bytes:,} B kept" for mode in off]
        if not off:
            lines.append(f"Kept bytes equal their formulas in all {len(self.modes)} modes, to the byte.")
        first = self.modes[0].losses
        lines.append(
            f"Loss {first[0]:.3f} → {first[-1]:.3f} in {len(first)} steps; between the modes' curves at most {self.spread():.1e}."
        )
        return [*lines, self.note]

    def spread(self) -> float:
        """The largest difference between two modes' losses of one step."""
        return max(max(step) - min(step) for step in zip(*(mode.losses for mode in self.modes)))

    def write_html(self, path: Path) -> None:
        from actmem_course.show.speed_figure import write_page  # plotly is loaded only to draw
        from actmem_course.show.training_figure import training_figure

        write_page(training_figure(self.modes, self.what, self.spread(), self.note), path)


def curve(losses: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """A loss curve in ``width`` characters: means of neighbouring steps, from the lowest to the highest."""
    width = min(width, len(losses))
    parts = [losses[len(losses) * i // width : len(losses) * (i + 1) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low = min(means) - (max(means) - min(means)) / 8  # the lowest has a height too
    return sparkline([round(1000 * (mean - low)) for mean in means])
