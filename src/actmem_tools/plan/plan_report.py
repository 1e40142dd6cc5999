"""Report what the search for layouts found: as one dict for JSON, and as tables that are printed from that dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING

from actmem.config import Parallel
from actmem.rows import size_text
from actmem_tools.command_line import empty_table
from actmem_tools.plan.framework_flags import settings_lines
from actmem_tools.plan.frameworks import LACKS
from actmem_tools.plan.planned_models import PlannedModel
from actmem_tools.plan.search import Counted, Plan, Request, SearchResult, bill_of
from actmem_tools.plan.step_time import GIBIBYTE, MATMUL_SHARE, MODEL_ERROR, Cluster

if TYPE_CHECKING:  # a page has the plan's words and not rich
    from rich.console import Console
    from rich.table import Table

#: For each line of a plan's time how its seconds are found: what is counted, and at which rate.
SECONDS_SOURCES = {
    "compute": "FLOPs counted, at an assumed share of the 16-bit peak; other operations by bytes moved",
    "recompute": "as compute, for what backward recomputes",
    "tensor": "bytes counted, at stated bandwidth; without what the matmuls of weights' gradients hide",
    "pipeline": "bytes counted, at stated bandwidth; nothing is hidden",
    "data": "bytes counted: the first gather, the last reduction, and what takes longer than its layer's computing",
    "bubble": "counted from the schedule: (p − 1)/(nm) of the working time",
    "optimizer": "bytes counted, at memory bandwidth",
    "hidden": "not in the sum: collectives that computing hides, if they run beside it as assumed",
}
#: The most characters of a term that a bill prints, so that the bytes fit on the same line.
_LONGEST_LINE = 50


def as_object(request: Request, found: SearchResult) -> dict:
    """Make the dict that ``actmem plan --json`` writes for a named model.

    Args:
        request: the job that was searched.
        found: the result of ``request.search``.

    Returns: a dict with these keys.
        request: a dict of the user's request: model, GPUs, batch, optimizer, precision, fixed sizes.
        counted: for how many layouts bytes were predicted.
        fitting: how many of these layouts fit.
        plans: the best plans, each a dict with its sizes, its bytes, its "seconds" by cause with their "total", its
            "mfu" (model FLOPs utilization) and its "text".
        ranking: sentences with the rule by which plans are ranked; "" if nothing fits.
        fixed_sizes: sentences on how much longer a step takes because the user fixed sizes; "" if no sizes were fixed
            or nothing fits.
        bill: everything that one rank of the first plan, the pipeline rank with the highest peak, holds: the "moment",
            "bytes", "lines" with "part", "term", "bytes" and "source" each, "allowance_bytes" and "free_bytes"; None if
            nothing fits.
        refused: the smallest layouts that don't fit, each with "over_bytes": by how many bytes it is too large.
        settings: a dict from each framework to the lines to paste for the first plan.
    """
    model, cluster, batch = request.model, request.cluster, request.global_batch_size
    chosen = found.plans[0] if found.plans else None
    return {
        "request": {
            "model": model.name,
            "num_parameters": model.num_parameters,
            "seq_length": model.seq_length,
            "routing": model.routing,
            "optimizer": model.optimizer.name,
            "precision": model.precision,
            "global_batch_size": batch,
            **asdict(cluster),
            "device": cluster.device.name,
            "product_share": MATMUL_SHARE,
            "fixed": dict(request.fixed),
        },
        "counted": found.counted,
        "fitting": found.fitting,
        "plans": [_plan_object(request, plan) for plan in found.plans],
        "ranking": _ranking_text(request, found) if chosen else "",
        "fixed_sizes": fixed_sizes_text(request, chosen) if chosen and request.fixed else "",
        "bill": _bill_object(model, chosen, cluster) if chosen else None,
        "refused": [
            {
                **asdict(refused),
                "over_bytes": refused.bytes - cluster.usable_bytes,
                "text": refusal_text(model, refused, cluster),
            }
            for refused in found.nearest
        ],
        "settings": {name: settings_lines(name, model, chosen, batch) if chosen else [] for name in LACKS},
    }


def _plan_object(request: Request, plan: Plan) -> dict:
    flops = request.model.model_flops(request.global_batch_size)
    peak = request.cluster.gpus * request.cluster.device.flops_per_second
    sizes = asdict(plan)
    return {
        **sizes.pop("layout"),
        **sizes,
        "seconds": sizes["seconds"] | {"total": plan.seconds.total},
        "mfu": flops / (plan.seconds.total * peak),
        "text": plan_text(plan),
    }


def _bill_object(model: PlannedModel, plan: Plan, cluster: Cluster) -> dict:
    bill = bill_of(model, plan)
    return {
        "moment": bill.moment,
        "bytes": bill.bytes,
        "lines": [
            {"part": part, "term": row.term, "bytes": row.bytes, "source": row.source}
            for part, rows in bill.parts.items()
            for row in rows
        ],
        "allowance_bytes": cluster.allowance_bytes,
        "free_bytes": cluster.usable_bytes - bill.bytes,
    }


def _ranking_text(request: Request, found: SearchResult) -> str:
    """Return sentences that say by which rule plans are ranked, and which layouts are among them."""
    which = "All plans" if request.everything else f"Plans that {', '.join(LACKS)} can run (all: --all)"
    return (
        f"{which}, by predicted seconds. Times within {MODEL_ERROR:.0%} of the fastest's, as {found.near:,} are, can't "
        f"be told apart. They are ranked by hidden time (collectives that must run beside computing, in steps of "
        f"{MODEL_ERROR:.0%} of the step), then the lower ZeRO stage, fewer axes, more free memory."
    )


def fixed_sizes_text(request: Request, first: Plan) -> str:
    """Return one or two sentences on the seconds that a step takes longer because the user fixed sizes of the layout.

    Args:
        request: the job, with fixed sizes.
        first: the best plan that has these sizes.

    Returns: a text that says how much longer a step takes than in the best plan without fixed sizes, and which kinds of
        seconds grow.  If ``first`` recomputes anything, it also says by how many bytes the layout would not fit without
        recomputation.
    """
    best = replace(request, fixed={}).search().plans[0]
    if best == first:
        return "The sizes asked for are those of the first plan without them."
    more = {
        name: here - there
        for name, here in asdict(first.seconds).items()
        if name != "hidden" and (here - (there := getattr(best.seconds, name))) > 0.01 * best.seconds.total
    }
    costs = ", ".join(f"{name} {size:.3f} s" for name, size in sorted(more.items(), key=lambda item: -item[1]))
    slower = first.seconds.total / best.seconds.total - 1
    text = (
        f"Without the sizes asked for, the first plan is {plan_text(best)}: {best.seconds.total:.3f} s; with them the "
        f"step takes {abs(slower):.1%} {'longer' if slower > 0 else 'less'} (more: {costs or 'nothing'})."
    )
    least = request.model.recompute_modes[0]
    if first.recompute == least:
        return text
    sizes = asdict(first.layout) | {"expert_parallel_size": first.layout.expert_ranks}
    without = replace(request, model=request.model.with_modes([least]), fixed=sizes)
    return f"{text} Recomputation is for {refusal_text(without.model, without.search().nearest[0], without.cluster)}."


def layout_text(layout: Parallel) -> str:
    """Return a layout as one line, such as "TP 8 + SP, PP 4, DP 2 ZeRO-1, b 1".

    TP, DP and b are always in it, other sizes only if they are above 1.
    """
    parts = [f"TP {layout.tensor_parallel_size}" + (" + SP" if layout.sequence_parallel else "")]
    for name, size in (
        ("PP", layout.pipeline_parallel_size),
        ("chunks", layout.num_model_chunks),
        ("CP", layout.context_parallel_size),
    ):
        if size > 1:
            parts.append(f"{name} {size}")
    if layout.expert_ranks > layout.tensor_parallel_size:
        parts.append(f"EP {layout.expert_ranks}")
    zero = f" ZeRO-{layout.zero_stage}" if layout.zero_stage else ""
    return ", ".join([*parts, f"DP {layout.data_parallel_size}{zero}", f"b {layout.micro_batch_size}"])


def plan_text(plan: Plan) -> str:
    """Return a plan as one line, its layout and its mode of recomputation: "TP 8 + SP, DP 2, b 1, selective"."""
    return f"{layout_text(plan.layout)}, {plan.recompute}"


def refusal_text(model: PlannedModel, refused: Counted, cluster: Cluster) -> str:
    """Return one line that says by how many bytes a layout doesn't fit, and which two parts of its bill are largest.

    Args:
        model: the planned model.
        refused: the layout that doesn't fit, with its bytes.
        cluster: the GPUs of the job.
    """
    largest = sorted(bill_of(model, refused).by_part().items(), key=lambda part: -part[1])[:2]
    parts = ", ".join(f"{name} {size / GIBIBYTE:.1f}" for name, size in largest)
    over = refused.bytes - cluster.usable_bytes
    return (
        f"{layout_text(refused.layout)}: {size_text(over)} too much on pipeline rank {refused.pipeline_rank} "
        f"with recomputation {refused.recompute} ({parts} GiB)"
    )


def print_plans(console: Console, outcome: Mapping) -> None:
    """Print the result of a search for layouts in tables of at most 80 columns.

    Args:
        console: the console to print on.
        outcome: the dict of the request, the plans, the first plan's bill and the settings, from ``as_object``.
    """

    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, highlight=False, markup=False)

    def head(text: str) -> None:
        console.print(f"\n[bold]{text}[/]", highlight=False)

    asked = outcome["request"]
    routing = f"{asked['routing']} routing, " if asked["routing"] else ""
    say(
        f"{asked['model']}, {asked['num_parameters'] / 1e9:,.1f} billion parameters, "
        f"s = {asked['seq_length']:,}, {routing}"
        f"{asked['global_batch_size']:,} sequences a step",
        f"{asked['gpus']:,} × {asked['device']}, {asked['per_node']} a node, "
        f"{asked['memory_bytes'] / GIBIBYTE:g} GiB each, "
        f"{asked['allowance_bytes'] / GIBIBYTE:g} GiB of it left free for CUDA, NCCL and the allocator",
        f"{outcome['counted']:,} layouts counted, {outcome['fitting']:,} fit",
    )
    if outcome["plans"]:
        console.print(_plans_table(outcome["plans"]))
        say(outcome["ranking"], *([outcome["fixed_sizes"]] if outcome["fixed_sizes"] else []))
        head(f"The first: {outcome['plans'][0]['text']}")
        console.print(_bill_table(outcome["bill"]))
        console.print(_seconds_table(outcome["plans"][0]["seconds"]))
        say("The bill is of this library's layer. The frameworks below run layers of their own, which may keep more.")
        for name, lines in outcome["settings"].items():
            head(f"Settings for {name}")
            console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    if outcome["refused"]:
        head("Nearest of those that do not fit")
        say(*(f"- {refused['text']}" for refused in outcome["refused"][:3]))


def _plans_table(plans: list[dict]) -> Table:
    found = empty_table("Plans", "plan", "s a step", "hidden", "MFU", "GiB")
    for plan in plans:
        seconds = (f"{plan['seconds'][name]:,.3f}" for name in ("total", "hidden"))
        found.add_row(plan["text"], *seconds, f"{100 * plan['mfu']:.1f}%", f"{plan['bytes'] / GIBIBYTE:.1f}")
    return found


def _bill_table(bill: Mapping) -> Table:
    """Return a table of a bill line by line, with the memory that stays free."""
    found = empty_table(f"The bill of the fullest rank: {bill['moment']}", "line", "bytes", "GiB")

    def add(name: str, size: int, lines: Iterable[Mapping] = ()) -> None:
        found.add_row(name, f"{size:,}", f"{size / GIBIBYTE:.2f}", style="bold")
        for line in lines:
            term, size = f"  {line['term']}", line["bytes"]
            found.add_row(term[:_LONGEST_LINE], f"{size:,}", f"{size / GIBIBYTE:.2f}", style="dim")

    for part, group in groupby(bill["lines"], key=lambda line: line["part"]):
        lines = list(group)
        add(part, sum(line["bytes"] for line in lines), lines)
    add("together", bill["bytes"])
    add("allowance", bill["allowance_bytes"])
    add("free", bill["free_bytes"])
    return found


def _seconds_table(seconds: Mapping[str, float]) -> Table:
    """Return a table of the predicted seconds of a step by what they are spent on, and how each number is found."""
    found = empty_table(f"Seconds of one step: {seconds['total']:.3f}", "line", "s", "source")
    for name, source in SECONDS_SOURCES.items():
        found.add_row(name, f"{seconds[name]:.3f}", source)
    return found
