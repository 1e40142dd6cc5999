"""Lab 6's reward: memory and speed of every mode side by side, and one loss curve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import torch
from rich.table import Table
from rich.text import Text
from torch.optim.optimizer import register_optimizer_step_post_hook

from actmem.config import ModelShape
from actmem.formulas.activations import TABLE2, Configuration
from actmem.measure.ledger import record
from actmem.rows import total
from actmem_course.judge.lab_checks.lab6_train import mode_named, mode_rows
from actmem_course.judge.reward import Reward, amount, bar, one_thread, sizes_text
from actmem_course.judge.workbench import Bench
from actmem_course.results import ModeCost
from actmem_course.show.tables import sparkline
from actmem_course.standard_library import standard_library

#: A mode may train for about so long, within so many steps.
_SECONDS, _FEWEST, _MOST = 3.0, 8, 60
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
        from actmem_course.show.measured import training_figure, write_page  # plotly is loaded only to draw

        write_page(training_figure(self.modes, self.what, self.spread(), self.note), path)


def curve(losses: Sequence[float]) -> str:
    """A loss curve in ``CURVE_WIDTH`` characters: means of neighbouring steps, from the lowest to the highest."""
    width = min(CURVE_WIDTH, len(losses))
    parts = [losses[len(losses) * i // width : len(losses) * (i + 1) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low = min(means) - (max(means) - min(means)) / 8  # the lowest has a height too
    return sparkline([round(1000 * (mean - low)) for mean in means])


def lab6_reward(b: Bench) -> ModesReward:
    """Train under every mode; count what one microbatch keeps."""
    heads = 2 * max(4, b.size)
    shape = ModelShape(128, 2, 16 * heads, heads, num_layers=2, vocab_size=256)
    text = standard_library(200_000, b.device)
    num_steps = _how_many_steps(b, shape, text)
    modes, spreads = [], []
    for i, mode in enumerate(TABLE2, 1):
        b.progress(f"mode {i} of {len(TABLE2)}, {mode.name}: {num_steps} steps")
        steps: list[float] = []
        hook = register_optimizer_step_post_hook(lambda *args, to=steps: to.append(time.perf_counter()))
        seconds, losses = _train(b, shape, mode, text, num_steps)
        hook.remove()
        spreads.append(_spread(steps))
        rows = mode_rows(b, shape, mode, mode.recompute)
        modes.append(ModeCost(mode.name, total(rows), _kept_bytes(b, shape, mode), seconds / num_steps, tuple(losses)))
    what = f"A GPT of {shape.num_layers} layers on rank {b.rank} of {b.size}: {sizes_text(shape)} v={shape.vocab_size}"
    note = "Bytes are of one microbatch in bfloat16 with dropout 0.1; time and loss are in float32 without dropout."
    note += f" A step's time is a mean; half of a mode's steps lay within {max(spreads):.0%} of their median."
    if b.size > 1:
        note += f"\nIn mode none each of the {b.size} ranks trains the whole model. What curves differ by is rounding: in float64 (6.5) nothing."
    return ModesReward(what, tuple(modes), note)


def _spread(ends: list[float]) -> float:
    """Half the distance between the quartiles of the steps' times, as a share of their median."""
    times = [after - before for before, after in zip(ends, ends[1:])]
    if len(times) < 4:
        return 0.0
    low, middle, high = quantiles(times, n=4)
    return (high - low) / 2 / middle


def _how_many_steps(b: Bench, shape: ModelShape, text: torch.Tensor) -> int:
    """The number of steps that a mode has time for; the same on every rank.  Warms up, too."""
    b.progress("how fast is this machine?")
    _train(b, shape, mode_named("none"), text, 1)
    seconds, _ = _train(b, shape, mode_named("none"), text, 3)
    slowest = max(b.gather(seconds)) / 3
    return max(_FEWEST, min(_MOST, round(_SECONDS / slowest)))


def _train(
    b: Bench, shape: ModelShape, mode: Configuration, text: torch.Tensor, num_steps: int
) -> tuple[float, list[float]]:
    with one_thread():
        b.gather(None)  # all ranks begin together
        start = time.perf_counter()
        losses = b["train"](shape, mode, text, num_steps, b.group, device=b.device)
        return time.perf_counter() - start, losses


def _kept_bytes(b: Bench, shape: ModelShape, mode: Configuration) -> int:
    """What one microbatch keeps on this rank, counted."""
    model = b["make_model"](shape, mode, b.group, dropout=0.1, dtype=torch.bfloat16, device=b.device)
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.int64, device=b.device)
    with record(model) as ledger:
        loss = model.loss(model(tokens), tokens)
    del loss
    return ledger.total_bytes
