"""Peers for terminals: a table for each mode, our time over theirs, and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from actmem_course.results import PeerLine
from actmem_course.show.speed_table import milliseconds, overhead_text, plain_table
from actmem_course.show.style import size_text


def peers_table(lines: Sequence[PeerLine], mode: str) -> Table:
    """The lines of one mode: medians, our time over each, bytes held (and over ours) and at the peak.  Ours is the first line."""
    table = plain_table(f"recompute: {mode}")
    table.add_column("layer", no_wrap=True)
    for name in ("forward", "backward", "both, ms", "ours ÷ it", "holds", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    ours = None
    for line in (line for line in lines if line.mode == mode):
        if line.unavailable or line.held_bytes is None or line.peak_bytes is None:
            continue
        each = line.bytes_per_sequence or line.held_bytes
        ours = ours or each
        times = (milliseconds(getattr(line, f"{part}_seconds")) for part in ("forward", "backward", "combined"))
        holds = _with_below(size_text(line.held_bytes), f"× {each / ours:.2f}")
        if line.wide_mask_bytes:
            holds.append(f"\nmasks:\n{size_text(line.wide_mask_bytes)}", style="dim")
        table.add_row(line.name.replace(", ", "\n  "), *times, _ratio(line), holds, size_text(line.peak_bytes))
    return table


def _ratio(line: PeerLine) -> Text:
    if line.ratio is None or line.ratio_low is None or line.ratio_high is None or line.noise is None:
        return Text("–")
    if line.is_real:
        return _with_below(f"{line.ratio:.2f}", f"{line.ratio_low:.2f}–{line.ratio_high:.2f}")
    return _with_below("same", f"within {max(line.noise, (line.ratio_high - line.ratio_low) / 2):.2f}")


def _with_below(text: str, below: str) -> Text:
    return Text(text).append(f"\n{below}", style="dim")


def overheads_table(lines: Sequence[PeerLine]) -> Table | None:
    """What each way to recompute costs each layer, over the same layer without; None if nothing of that ran."""
    over = {(line.name, line.mode): line.over for line in lines if line.over}
    if not over:
        return None
    modes = list(dict.fromkeys(mode for _, mode in over))
    table = plain_table("overhead of recomputation")
    table.add_column("layer", no_wrap=True)
    for mode in modes:
        table.add_column(mode, justify="right", no_wrap=True)
    for name in dict.fromkeys(name for name, _ in over):
        table.add_row(name, *(overhead_text(over[name, mode]) if (name, mode) in over else "" for mode in modes))
    return table


def elementwise_line(lines: Sequence[PeerLine], name: str, selective_units: float, elementwise_units: float) -> str:
    """One sentence on ``elementwise`` beside ``selective``: time in this run, and bytes in 16 bits; "" if either did not run.

    units: bytes in 16 bits, in sbh/t.
    """
    over = next((line.over_selective for line in lines if line.name == name and line.over_selective), None)
    if over is None:
        return ""
    low, high = 1 + over.low, 1 + over.high
    return (
        f"{name}, elementwise beside selective: {1 + over.value:.3f} of its time ({low:.3f}–{high:.3f}), "
        f"{elementwise_units:g}/{selective_units:g} of its bytes in 16 bits (sbh/t)."
    )


def missing_lines(lines: Sequence[PeerLine]) -> list[str]:
    """One sentence for each peer that did not run, and in which modes."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.unavailable:
            reasons.setdefault((line.name, line.unavailable), []).append(line.mode)
    return [f"{name} did not run ({', '.join(modes)}): {reason}" for (name, reason), modes in reasons.items()]
