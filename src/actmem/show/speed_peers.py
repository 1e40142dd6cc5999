"""Peers for terminals: a table for each mode, our time over theirs, bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from actmem.show.speed_table import milliseconds, overhead_text, plain_table
from actmem.show.style import size_text


def peers_table(lines: Sequence, mode: str) -> Table:
    """The lines of one mode: medians, our time over each, bytes held (and over ours) and at the peak.

    lines: objects with the fields of lab.peers.PeerLine, ours first.
    """
    table = plain_table(f"recompute: {mode}")
    table.add_column("layer", no_wrap=True)
    for name in ("forward", "backward", "both, ms", "ours ÷ it", "holds", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    own = [line for line in lines if line.mode == mode]
    for line in own:
        if line.unavailable:
            continue
        times = (milliseconds(getattr(line, f"{part}_seconds")) for part in ("forward", "backward", "combined"))
        holds = Text(size_text(line.held_bytes))
        holds.append(f"\n× {line.held_bytes / own[0].held_bytes:.2f}", style="dim")
        table.add_row(line.name, *times, _ratio(line), holds, size_text(line.peak_bytes))
    return table


def _ratio(line) -> Text:
    if line.ratio is None:
        return Text("–")
    if not line.is_real:
        text = Text("same")
        text.append(f"\nwithin {max(line.noise, (line.ratio_high - line.ratio_low) / 2):.2f}", style="dim")
        return text
    text = Text(f"{line.ratio:.2f}")
    text.append(f"\n{line.ratio_low:.2f}–{line.ratio_high:.2f}", style="dim")
    return text


def overheads_table(lines: Sequence) -> Table | None:
    """What each way to recompute costs each layer, over the same layer without; None if nothing of that ran."""
    over = {(line.name, line.mode): line for line in lines if line.overhead is not None}
    if not over:
        return None
    modes = list(dict.fromkeys(mode for _, mode in over))
    table = plain_table("overhead of recomputation")
    table.add_column("layer", no_wrap=True)
    for mode in modes:
        table.add_column(mode, justify="right", no_wrap=True)
    for name in dict.fromkeys(name for name, _ in over):
        table.add_row(name, *(_overhead(over[name, mode]) if (name, mode) in over else "" for mode in modes))
    return table


def _overhead(line) -> str:
    return overhead_text(line.overhead, line.overhead_low, line.overhead_high, line.overhead_is_real, line.noise)


def missing_lines(lines: Sequence) -> list[str]:
    """One sentence for each peer that did not run, and in which modes."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.unavailable:
            reasons.setdefault((line.name, line.unavailable), []).append(line.mode)
    return [f"{name} did not run ({', '.join(modes)}): {reason}" for (name, reason), modes in reasons.items()]
