"""What ``plan --verify`` prints."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from actmem.plan.plan_report import plan_text
from actmem.plan.planned_models import PlannedModel
from actmem.plan.search import Plan
from actmem.rows import Match
from actmem.verify.verify_plan import NOT_RUN, CountedPeak, count_peak, verify_plan


def report_verification(console: Console, model: PlannedModel, plan: Plan) -> bool:
    """Verify the plan, print each line of its bill beside the counted one, and the peak; True if all are equal."""
    comparison = verify_plan(model, plan)
    matches = comparison.matched + comparison.changed + comparison.missing + comparison.extra
    console.print(f"\n[bold]Verified:[/] {plan_text(plan)}", highlight=False)
    console.print(_table(matches, plan))
    verdict = f"{len(comparison.matched)} of {len(matches)} lines equal what is counted, to the byte"
    console.print(verdict if comparison.exact else f"[bold red]{verdict}", highlight=False)
    peak = count_peak(model, plan)
    text = _peak_text(peak)
    console.print(text if peak.exact else f"[bold red]{text}", highlight=False)
    console.print(NOT_RUN, highlight=False)
    return comparison.exact and peak.exact


def _table(matches: tuple[Match, ...], plan: Plan) -> Table:
    title = f"Pipeline rank {plan.pipeline_rank}, emulated on CPU: the bill and what is counted"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    table.add_column("line", no_wrap=True)
    for name in ("bill", "counted", "diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for match in matches:
        cells = (f"{match.predicted or 0:,}", f"{match.measured or 0:,}", f"{match.difference:,}")
        table.add_row(match.term, *cells, style="bold red" if match.difference else "")
    return table


def _peak_text(peak: CountedPeak) -> str:
    return (
        f"Beyond that, at the peak of the next backward pass: bill {peak.predicted_bytes:,} B, "
        f"counted {peak.counted_bytes:,} B, difference {peak.counted_bytes - peak.predicted_bytes:,}"
    )
