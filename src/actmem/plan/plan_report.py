"""A search's outcome for people and for programs: tables, and one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from actmem.plan.explain import (
    half_the_gpus,
    layout_text,
    nearest_that_fits,
    plan_text,
    refusal_text,
    twice_the_sequence,
)
from actmem.plan.hardware import GIBIBYTE, Cluster
from actmem.plan.outcome import Found, Plan
from actmem.plan.planned_model import PlannedModel
from actmem.plan.rank_bill import Bill
from actmem.plan.search import bill_of
from actmem.plan.settings import FRAMEWORK_SETTINGS

#: What each line of a plan's time is: counted, with an assumed rate.
SECONDS_SOURCES = {
    "compute": "FLOPs counted, at an assumed share of the peak; other operations by bytes moved",
    "recompute": "as compute, for what runs again",
    "tensor": "bytes counted, stated bandwidth; backward's reductions assumed hidden behind products",
    "pipeline": "bytes counted, stated bandwidth, nothing hidden",
    "data": "bytes counted, stated bandwidth, beyond what is assumed hidden",
    "bubble": "counted from the schedule: (p − 1)/(nm) of the working time",
    "optimizer": "bytes counted, memory bandwidth",
}


@dataclass(frozen=True)
class Request:
    """What was asked for: the model with its sequence length, the GPUs, the sequences of one step."""

    model: PlannedModel
    cluster: Cluster
    global_batch_size: int


def as_object(request: Request, found: Found) -> dict:
    """The whole outcome, for JSON: plain numbers and text."""
    model, cluster = request.model, request.cluster
    chosen = found.plans[0] if found.plans else None
    return {
        "request": {
            "model": model.name,
            "num_parameters": model.num_parameters,
            "seq_length": model.seq_length,
            "routing": model.routing,
            "global_batch_size": request.global_batch_size,
            "gpus": cluster.gpus,
            "per_node": cluster.per_node,
            "memory_bytes": cluster.memory_bytes,
            "allowance_bytes": cluster.allowance_bytes,
            "device": cluster.device.name,
            "product_share": cluster.product_share,
        },
        "counted": found.counted,
        "fitting": found.fitting,
        "plans": [_plan_object(request, plan) for plan in found.plans],
        "bill": _bill_object(bill_of(model, chosen), cluster) if chosen else None,
        "refused": [
            {
                "layout": asdict(refused.layout),
                "recompute": refused.recompute,
                "pipeline_rank": refused.pipeline_rank,
                "bytes": refused.bytes,
                "over_bytes": refused.bytes - cluster.usable_bytes,
                "text": refusal_text(model, refused, cluster),
            }
            for refused in found.nearest
        ],
        "sizes_that_do_not_fit_together": found.unfit,
        "what_if": what_ifs(request, found),
        "settings": {
            name: settings(model, chosen, request.global_batch_size) if chosen else []
            for name, settings in FRAMEWORK_SETTINGS.items()
        },
    }


def what_ifs(request: Request, found: Found) -> list[str]:
    """Half the GPUs and twice the sequence; where nothing fits, what would."""
    sizes = request.model, request.cluster, request.global_batch_size
    if not found.plans:
        return [nearest_that_fits(*sizes, found)]
    return [half_the_gpus(*sizes), twice_the_sequence(*sizes)]


def _plan_object(request: Request, plan: Plan) -> dict:
    seconds = asdict(plan.seconds) | {"total": plan.seconds.total}
    flops = request.model.model_flops(request.global_batch_size)
    peak = request.cluster.gpus * request.cluster.device.flops_per_second
    return {
        **asdict(plan.layout),
        "recompute": plan.recompute,
        "whole_microbatches": plan.whole_microbatches,
        "recomputed_share": plan.recomputed,
        "num_microbatches": plan.num_microbatches,
        "pipeline_rank": plan.pipeline_rank,
        "bytes": plan.bytes,
        "seconds": seconds,
        "mfu": flops / (plan.seconds.total * peak),
        "text": plan_text(plan),
    }


def _bill_object(bill: Bill, cluster: Cluster) -> dict:
    lines = [
        {"part": part, "term": row.term, "bytes": row.bytes, "source": row.source, "extra": row.extra}
        for part, rows in bill.parts.items()
        for row in rows
    ]
    return {
        "moment": bill.moment,
        "bytes": bill.bytes,
        "lines": lines,
        "allowance_bytes": cluster.allowance_bytes,
        "free_bytes": cluster.usable_bytes - bill.bytes,
    }


def print_plans(console: Console, request: Request, found: Found) -> None:
    """Everything, in tables of at most 80 columns."""
    model, cluster = request.model, request.cluster
    console.print(
        f"[bold]{model.name}[/], {model.num_parameters / 1e9:,.1f} billion parameters, s = {model.seq_length:,}, "
        f"{f'{model.routing} routing, ' if model.routing else ''}"
        f"{request.global_batch_size:,} sequences a step\n{cluster.gpus:,} × {cluster.device.name}, "
        f"{cluster.per_node} a node, {cluster.memory_bytes / GIBIBYTE:g} GiB each, {cluster.allowance_bytes / GIBIBYTE:g} GiB of it "
        "left free for CUDA, NCCL and the allocator",
        highlight=False,
    )
    console.print(f"{found.counted:,} layouts counted, {found.fitting:,} fit", highlight=False)
    if found.plans:
        console.print(plans_table(request, found.plans))
        _print_chosen(console, request, found.plans[0])
    if found.nearest:
        console.print("\n[bold]Nearest of those that do not fit[/]")
        for refused in found.nearest[:3]:
            console.print(f"- {refusal_text(model, refused, cluster)}", highlight=False)
    if found.unfit:
        console.print("\n[bold]Sizes that do not go together[/]")
        for reason, count in sorted(found.unfit.items(), key=lambda item: (-item[1], item[0]))[:3]:
            console.print(f"- {count:,} layouts: {reason}", highlight=False)
    console.print("\n[bold]What it would take[/]")
    for line in what_ifs(request, found):
        console.print(f"- {line}", highlight=False)


def _print_chosen(console: Console, request: Request, plan: Plan) -> None:
    console.print(f"\n[bold]The fastest:[/] {plan_text(plan)}", highlight=False)
    console.print(bill_table(bill_of(request.model, plan), request.cluster))
    console.print(seconds_table(plan))
    for name, settings in FRAMEWORK_SETTINGS.items():
        console.print(f"[bold]{name}[/]")
        console.print(
            "\n".join(settings(request.model, plan, request.global_batch_size)), highlight=False, markup=False
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("plan", "line", "source") else "right", no_wrap=name != "source"
        )
    return table


def plans_table(request: Request, plans: list[Plan]) -> Table:
    """Plans, fastest first."""
    table = _table("Plans, fastest first", "plan", "s a step", "MFU", "GiB")
    for plan in plans:
        mfu = _plan_object(request, plan)["mfu"]
        kept = f", {plan.whole_microbatches} whole" if plan.whole_microbatches else ""
        text = f"{layout_text(plan.layout)}\n  recomputes {plan.recompute}{kept}"
        table.add_row(text, f"{plan.seconds.total:,.3f}", f"{100 * mfu:.1f}%", f"{plan.bytes / GIBIBYTE:.1f}")
    return table


def bill_table(bill: Bill, cluster: Cluster) -> Table:
    """A bill, line by line."""
    table = _table(f"The bill of the fullest rank: {bill.moment}", "line", "bytes", "GiB")
    for part, rows in bill.parts.items():
        if not rows:
            continue
        size = sum(row.bytes for row in rows)
        table.add_row(f"[bold]{part}[/]", f"[bold]{size:,}[/]", f"[bold]{size / GIBIBYTE:.2f}[/]")
        for row in rows:
            table.add_row(f"  {row.term}", f"{row.bytes:,}", f"{row.bytes / GIBIBYTE:.2f}", style="dim")
    table.add_row("[bold]together[/]", f"[bold]{bill.bytes:,}[/]", f"[bold]{bill.bytes / GIBIBYTE:.2f}[/]")
    allowance = "allowance for CUDA, NCCL, the allocator"
    table.add_row(allowance, f"{cluster.allowance_bytes:,}", f"{cluster.allowance_bytes / GIBIBYTE:.2f}")
    free = cluster.usable_bytes - bill.bytes
    table.add_row("free", f"{free:,}", f"{free / GIBIBYTE:.2f}")
    return table


def seconds_table(plan: Plan) -> Table:
    """Where the predicted time of a step goes, and what each part rests on."""
    table = _table(f"Seconds of one step: {plan.seconds.total:.3f}", "line", "s", "source")
    for name, seconds in asdict(plan.seconds).items():
        table.add_row(name, f"{seconds:.3f}", SECONDS_SOURCES[name])
    return table
