"""Lab 6's reward: memory and speed of every mode side by side, and one loss curve."""

from __future__ import annotations

import time
from statistics import quantiles

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from actmem.config import ModelShape
from actmem.formulas.table2 import TABLE2, Configuration
from actmem.measure.ledger import record
from actmem.rows import total
from actmem_course.judge.costs import one_thread
from actmem_course.judge.lab_checks.lab6_model import mode_named, mode_rows
from actmem_course.judge.modes import ModesReward
from actmem_course.judge.reward import sizes_text
from actmem_course.judge.workbench import Bench
from actmem_course.results import ModeCost
from actmem_course.standard_library import standard_library

#: A mode may train for about so long, within so many steps.
_SECONDS, _FEWEST, _MOST = 3.0, 8, 60


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
