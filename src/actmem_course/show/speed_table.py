"""Table 4 for terminals: times with their quartiles, and no overhead that could be noise."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from actmem_course.results import Overhead, SpeedLine
from actmem_course.show.style import size_text


def speed_table(lines: Iterable[SpeedLine], title: str) -> Table:
    """Three lines a variant: medians; quartiles, bytes held and FLOPs; peak bytes and the paper's overhead."""
    table = plain_table(title)
    table.add_column("one layer, milliseconds", no_wrap=True)
    for name in ("forward", "backward", "both", "overhead"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        label = Text(line.name, style="" if line.exact else "bold red")
        label.append(
            f"\n  holds {size_text(line.held_bytes)}\n  peak {size_text(line.peak_bytes)}", style="dim not bold"
        )
        times = [
            with_quartiles(getattr(line, f"{part}_seconds"), getattr(line, f"{part}_quartiles"))
            for part in ("forward", "backward", "combined")
        ]
        table.add_row(label, *times, _overhead(line))
    return table


def _overhead(line: SpeedLine) -> Text:
    text = Text(overhead_text(line.over))
    flops = f"\nFLOPs +{100 * line.flops_overhead:.1f}%" if line.flops_overhead else "\n"
    paper = f"\npaper {line.paper_overhead_percent:+}%" if line.paper_overhead_percent is not None else ""
    text.append(flops + paper, style="dim")
    return text


def overhead_text(over: Overhead | None) -> str:
    """``+4.1% ±0.3``; an overhead that could be noise is not printed, only how large the noise is.  A dash for none."""
    if over is None:
        return "–"
    if not over.is_real:
        return f"within ±{_percent(over.within)}%"
    return f"{100 * over.value:+.1f}% ±{_percent(over.margin)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def with_quartiles(seconds: float, quartiles: tuple[float, float]) -> Text:
    """Milliseconds, and the quartiles below them."""
    text = Text(milliseconds(seconds))
    text.append("\n" + "–".join(map(milliseconds, quartiles)), style="dim")
    return text


def milliseconds(seconds: float) -> str:
    """Milliseconds to three digits, at most two after the point: ``0.12``, ``12.3``, ``1,234``."""
    value = 1000 * seconds
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def noise_line(noise: float, rounds: int, clock: str) -> str:
    """How noisy the runs were, in one sentence."""
    return (
        f"Noise: the baseline against itself, in the same {rounds} rounds, came out up to {100 * noise:.1f}% apart "
        f"({clock}). Smaller overheads are not shown."
    )


def plain_table(title: str) -> Table:
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
