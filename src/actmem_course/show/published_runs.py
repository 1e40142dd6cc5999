"""Runs that others published: printed numbers beside predicted ones, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from actmem_course.results import CalculatorResult, PaperChoiceResult, RunResult, StepTimeResult
from actmem_course.show.speed_table import plain_table

_MIB_IN_GIB = 1024


def runs_table(results: Sequence[RunResult], title: str = "Peak of one GPU, MiB") -> Table:
    """A run a line: its setting, the printed peak, the predicted one, the difference in MiB and percent."""
    table = plain_table(title)
    table.add_column("run", no_wrap=True)
    for name in ("printed", "predicted", "diff.", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        if r.predicted_mib is None or r.difference_percent is None:
            table.add_row(r.setting, f"{r.printed_mib:,.2f}", "-", "", "")
            continue
        table.add_row(
            r.setting,
            f"{r.printed_mib:,.2f}",
            f"{r.predicted_mib:,.2f}",
            f"{r.predicted_mib - r.printed_mib:+,.2f}",
            f"{r.difference_percent:+.3f}",
            style="bold red" if r.within_limit is False else "",
        )
    return table


def reserved_table(results: Sequence[RunResult]) -> Table:
    """Runs that logged what their allocator reserved, in GiB: printed, what we count of it, and why no more."""
    table = plain_table("torchtitan: GiB that the allocator reserved, and what we count of them")
    table.add_column("run", overflow="fold")
    for name in ("printed", "counted", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        share = "" if r.predicted_mib is None else f"{100 * r.predicted_mib / r.printed_mib:.0f}%"
        counted = "-" if r.predicted_mib is None else f"{r.predicted_mib / _MIB_IN_GIB:.1f}"
        table.add_row(f"{r.setting}: {r.note}", f"{r.printed_mib / _MIB_IN_GIB:.1f}", counted, share)
    return table


def times_table(results: Sequence[StepTimeResult]) -> Table:
    """Published step times beside the planner's."""
    table = plain_table("Step times: printed, and by the planner's time model")
    table.add_column("run", overflow="fold")
    for name in ("unit", "printed", "predicted", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        cells = (r.unit, f"{r.printed:,.2f}", f"{r.predicted:,.2f}", f"{r.difference_percent:+.1f}")
        table.add_row(f"{r.source}: {r.setting}", *cells)
    return table


def choices_table(results: Sequence[PaperChoiceResult]) -> Table:
    """The paper's plans beside the fastest of wider and wider searches, by predicted time."""
    table = plain_table("The paper's plans: how much longer a step takes than by the fastest plan")
    for name in ("model", "may use"):
        table.add_column(name, no_wrap=True)
    table.add_column("the fastest", overflow="fold")
    for name in ("%", "s hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        best = "the paper's" if r.best_plan == r.paper_plan else r.best_plan
        table.add_row(r.model, r.search, best, f"{r.behind_percent:.1f}", f"{r.hidden_seconds:.1f}")
    return table


def calculators_table(results: Sequence[CalculatorResult], title: str) -> Table:
    """What public calculators print beside counted bytes: a block of rows for each calculator."""
    table = plain_table(title)
    table.add_column("bytes of one rank", no_wrap=True)
    for name in ("printed", "counted", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for r in results:
        if r.calculator != last:
            table.add_row(r.calculator, style="bold")
        last = r.calculator
        table.add_row(f"  {r.row}", f"{r.printed_bytes:,}", f"{r.counted_bytes:,}", f"{r.difference_bytes:+,}")
    return table


def parts_table(results: Sequence[RunResult]) -> Table:
    """What the predicted peak of each run is made of, in MiB, and when it is reached."""
    parts = list(dict.fromkeys(part for r in results for part in r.parts_bytes or {}))
    table = plain_table("What the predicted peak is made of, MiB")
    table.add_column("part", no_wrap=True)
    for name in ("least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share of the peak", justify="right", no_wrap=True)
    shown = [(r.predicted_mib, r.parts_bytes or {}) for r in results if r.predicted_mib is not None]
    for part in parts:
        sizes = [of_run.get(part, 0) / 2**20 for _, of_run in shown]
        shares = [100 * size / peak for size, (peak, _) in zip(sizes, shown)]
        table.add_row(part, f"{min(sizes):,.1f}", f"{max(sizes):,.1f}", f"{min(shares):.1f} – {max(shares):.1f}%")
    return table
