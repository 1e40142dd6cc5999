"""Lab 4's reward: one layer without recomputation, with selective, with full."""

from __future__ import annotations

import torch

from actmem.config import ModelShape
from actmem.formulas.activations import RNG_STATE_BYTES, layer_extra_rows, layer_rows
from actmem.recipes import Recompute
from actmem.rows import total
from actmem_course.judge.cases.lab4_recompute import as_block, flops_of, layer_weights
from actmem_course.judge.costs import costs
from actmem_course.judge.reward import BarsReward, Measure, Reward, sizes_text
from actmem_course.judge.solutions import lab4_recompute as ours
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import layer


def lab4_reward(b: Bench) -> Reward:
    """One layer without recomputation, with selective, with full: bytes, FLOPs, time."""
    shape, dtype = (
        ModelShape(seq_length=256, micro_batch_size=1, hidden_size=128, num_attention_heads=4),
        torch.bfloat16,
    )
    sizes = (shape.seq_length, shape.micro_batch_size, shape.hidden_size)
    x, weights = b.random(*sizes, seed=30).to(dtype), layer_weights(shape, dtype, b.device)
    modes = {
        "none": (layer, layer),
        "selective": (b["selective_layer"], ours.selective_layer),
        "full": (b["full_layer"], ours.full_layer),
    }
    functions = {
        f"{mode} {side}": as_block(function, shape)
        for mode, pair in modes.items()
        for side, function in zip(("yours", "ours"), pair)
    }
    found = costs(b, functions, x, weights)
    kept_bytes, times, notes = [], [], []
    plain = flops_of(as_block(layer, shape), x, *weights)
    for mode, (yours, _) in modes.items():
        own, other = found[f"{mode} yours"], found[f"{mode} ours"]
        formula = total(layer_rows(shape, recompute=mode)) + _extra_bytes(shape, mode, b.device)
        kept_bytes.append(Measure(f"kept, {mode}", "B", {"formula": formula, "yours": own.bytes, "ours": other.bytes}))
        times.append(
            Measure(
                f"time, {mode}",
                "ms",
                {"yours": own.milliseconds, "ours": other.milliseconds},
                max(own.noise, other.noise),
            )
        )
        if mode != "none":
            notes.append(f"{mode} {100 * (flops_of(as_block(yours, shape), x, *weights) / plain - 1):.1f}%")
    remark = (
        f"More FLOPs, by torch's counter: {', '.join(notes)}. The formula has one random-number state for each region."
    )
    return BarsReward(
        f"One layer on {b.device}: {sizes_text(shape)}, bfloat16",
        (*kept_bytes, *times),
        remark,
        one_scale=True,
    )


def _extra_bytes(shape: ModelShape, recompute: str, device: str) -> int:
    """What the paper leaves out, as this lab's layer has it: its mask is made in the core, its dropouts draw from one stream."""
    region = Recompute.of(recompute).region
    if region != "none":
        statistics = [row for row in layer_extra_rows(shape, device_type=device) if "statistics" in row.term]
        return (
            RNG_STATE_BYTES["cpu"]
            + RNG_STATE_BYTES["cuda"] * (device == "cuda")
            + total(statistics) * (region == "core")
        )
    return total(layer_extra_rows(shape, device_type=device))
