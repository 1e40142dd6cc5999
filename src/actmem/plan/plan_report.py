"""A search's outcome for people and for programs: tables, and one JSON object.

Among it why layouts were refused, what the nearest would need, and what half the GPUs or twice the sequence would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from actmem.config import ConfigError
from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedModel
from actmem.plan.rank_bill import Bill, refusal
from actmem.plan.search import Found, Plan, Refused, bill_of, divisors, find_plans
from actmem.plan.settings import FRAMEWORK_SETTINGS, hugging_face_config
from actmem.plan.step_time import CONTEXT_BYTES, GIBIBYTE, GROUP_BYTES, MODEL_ERROR, PRODUCT_SHARE, Cluster, gib_or_mib
from actmem.rows import Row, total

if TYPE_CHECKING:  # a page has the plan's words and not rich
    from rich.console import Console
    from rich.table import Table

#: What each line of a plan's time is: counted, with an assumed rate.
SECONDS_SOURCES = {
    "compute": "FLOPs counted, at an assumed share of the peak; other operations by bytes moved",
    "recompute": "as compute, for what runs again",
    "tensor": "bytes counted, stated bandwidth; of backward's reductions what takes longer than weights' gradients",
    "pipeline": "bytes counted, stated bandwidth, nothing hidden",
    "data": "bytes counted: the first weights, the last gradients, what takes longer than its layer's computing",
    "bubble": "counted from the schedule: (p − 1)/(nm) of the working time",
    "optimizer": "bytes counted, memory bandwidth",
    "hidden": "not in the sum: exchanges beside computing, if it hides them as assumed",
}
#: Characters of a line's name that leave room for its bytes.
_LONGEST_LINE = 50


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
            "optimizer": model.optimizer,
            "global_batch_size": request.global_batch_size,
            **asdict(cluster),
            "device": cluster.device.name,
            "product_share": PRODUCT_SHARE,
        },
        "counted": found.counted,
        "fitting": found.fitting,
        "plans": [_plan_object(request, plan) for plan in found.plans],
        "ranking": ranking_text(found) if found.plans else "",
        "bill": _bill_object(bill_of(model, chosen), chosen.layout, cluster) if chosen else None,
        "refused": [
            {
                **asdict(refused),
                "over_bytes": refused.bytes - cluster.usable_bytes,
                "text": refusal_text(model, refused, cluster),
            }
            for refused in found.nearest
        ],
        "sizes_that_do_not_fit_together": found.unfit,
        "what_if": what_ifs(request, found),
        "whose_bill": whose_bill(request),
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


def _lines(rows: Iterable[Row]) -> list[dict]:
    return [{"term": row.term, "bytes": row.bytes, "source": row.source} for row in rows]


def _bill_object(bill: Bill, layout: Layout, cluster: Cluster) -> dict:
    return {
        "moment": bill.moment,
        "bytes": bill.bytes,
        "lines": [{"part": part, **line} for part, rows in bill.parts.items() for line in _lines(rows)],
        "allowance_bytes": cluster.allowance_bytes,
        "allowance_lines": _lines(allowance_rows(layout, cluster)),
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
        console.print(ranking_text(found), highlight=False)
        chosen = found.plans[0]
        console.print(f"\n[bold]The fastest:[/] {plan_text(chosen)}", highlight=False)
        console.print(bill_table(bill_of(model, chosen), chosen.layout, cluster))
        console.print(seconds_table(chosen))
        console.print(f"[bold]Settings.[/] {whose_bill(request)}", highlight=False)
        for name, settings in FRAMEWORK_SETTINGS.items():
            lines = settings(model, chosen, request.global_batch_size)
            console.print(f"[bold]{name}[/]")
            console.print("\n".join(lines), highlight=False, markup=False)
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


def whose_bill(request: Request) -> str:
    """Whose code the bill is of, and how to get that of other code."""
    text = "The bill is of this library's layer; the code that these set runs its own, which may keep more."
    try:
        hugging_face_config(request.model)
    except ConfigError:
        return text
    cluster = request.cluster
    sizes = (
        f"--gpus {cluster.gpus} --memory {cluster.memory_bytes / GIBIBYTE:g} --global-batch {request.global_batch_size}"
    )
    at = f"--at s={request.model.seq_length}"
    return f"{text} Hugging Face's, counted: plan {request.model.name} {sizes} {at} --framework hugging-face"


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for name in columns:
        table.add_column(
            name,
            justify="left" if name in ("plan", "line", "source") else "right",
            no_wrap=name not in ("plan", "source"),
        )
    return table


def plans_table(request: Request, plans: list[Plan]) -> Table:
    """Plans, fastest first."""
    table = _table("Plans, fastest first", "plan", "s a step", "hidden", "MFU", "GiB")
    for plan in plans:
        mfu = _plan_object(request, plan)["mfu"]
        kept = f", {plan.whole_microbatches} whole" if plan.whole_microbatches else ""
        text = f"{layout_text(plan.layout)}\n  recomputes {plan.recompute}{kept}"
        seconds = (f"{each:,.3f}" for each in (plan.seconds.total, plan.seconds.hidden))
        table.add_row(text, *seconds, f"{100 * mfu:.1f}%", f"{plan.bytes / GIBIBYTE:.1f}")
    return table


def ranking_text(found: Found) -> str:
    """The rule by which plans are ranked, and which of them it can't tell apart."""
    rule = "Ranked by predicted seconds, then bytes. Hidden: exchanges that must run beside computing."
    least = found.least_hidden
    if found.near < 2 or least is None:
        return rule
    return (
        f"{rule} {found.near:,} plans are within {MODEL_ERROR:.0%} of the first, nearer than the times are right; of them "
        f"{plan_text(least)} hides least: {least.seconds.hidden:,.3f} of {least.seconds.total:,.3f} s."
    )


def allowance_rows(layout: Layout, cluster: Cluster) -> list[Row]:
    """What the allowance is for, as others saw it; the allocator has the rest, none if the others take all."""
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size)
    groups = sum(size > 1 for size in (*sizes, layout.data_parallel_size * layout.context_parallel_size))
    rows = [
        Row("CUDA's context", CONTEXT_BYTES, source="pytorch issue 107667, kernels loaded when they run"),
        Row(
            f"NCCL, {groups} groups of ranks", groups * GROUP_BYTES, source="NVIDIA/nccl issue 964, more than two A100"
        ),
    ]
    rest = max(0, cluster.allowance_bytes - total(rows))
    return [*rows, Row("the allocator, beyond what it hands out", rest, source="0.15 to 2.8 GiB in 36 nanotron runs")]


def bill_table(bill: Bill, layout: Layout, cluster: Cluster) -> Table:
    """A bill, line by line, and what stays free."""
    table = _table(f"The bill of the fullest rank: {bill.moment}", "line", "bytes", "GiB")

    def add(name: str, size: int, rows: Iterable[Row] = ()) -> None:
        for line, number, style in ((name, size, "bold"), *((f"  {row.term}", row.bytes, "dim") for row in rows)):
            table.add_row(line[:_LONGEST_LINE], f"{number:,}", f"{number / GIBIBYTE:.2f}", style=style)

    for part, rows in bill.parts.items():
        if rows:
            add(part, total(rows), rows)
    add("together", bill.bytes)
    add("allowance", cluster.allowance_bytes, allowance_rows(layout, cluster))
    add("free", cluster.usable_bytes - bill.bytes)
    return table


def seconds_table(plan: Plan) -> Table:
    """Where the predicted time of a step goes, and what each part rests on."""
    table = _table(f"Seconds of one step: {plan.seconds.total:.3f}", "line", "s", "source")
    for name, seconds in asdict(plan.seconds).items():
        table.add_row(name, f"{seconds:.3f}", SECONDS_SOURCES[name])
    return table


def layout_text(layout: Layout) -> str:
    """A layout in one line: only the sizes that aren't 1."""
    parts = [f"TP {layout.tensor_parallel_size}" + (" + SP" if layout.sequence_parallel else "")]
    for name, size in (
        ("PP", layout.pipeline_parallel_size),
        ("chunks", layout.num_model_chunks),
        ("CP", layout.context_parallel_size),
    ):
        if size > 1:
            parts.append(f"{name} {size}")
    zero = f" ZeRO-{layout.zero_stage}" if layout.zero_stage else ""
    return ", ".join([*parts, f"DP {layout.data_parallel_size}{zero}", f"b {layout.micro_batch_size}"])


def plan_text(plan: Plan) -> str:
    """A plan in one line."""
    whole = plan.whole_microbatches
    kept = f", {whole} microbatch{'es' * (whole > 1)} whole" if whole else ""
    return f"{layout_text(plan.layout)}, {plan.recompute}{kept}"


def refusal_text(model: PlannedModel, refused: Refused, cluster: Cluster) -> str:
    """What did not fit and by how much, with the two largest parts of the bill."""
    largest = sorted(bill_of(model, refused).by_part().items(), key=lambda part: -part[1])[:2]
    parts = ", ".join(f"{name} {size / GIBIBYTE:.1f}" for name, size in largest)
    over = refused.bytes - cluster.usable_bytes
    return (
        f"{layout_text(refused.layout)}: {gib_or_mib(over)} too much on pipeline rank {refused.pipeline_rank} "
        f"with recomputation {refused.recompute} ({parts} GiB)"
    )


def check_memory_of_one_layer(model: PlannedModel, cluster: Cluster) -> None:
    """Raise ConfigError if a GPU can't even hold one layer: its 16-bit weights, and what it keeps of one sequence.

    Divided among all GPUs of a node, or as many of them as can share the layer.
    """
    ranks = reversed(divisors(cluster.per_node, min(cluster.per_node, cluster.gpus)))
    layouts = (Layout(tensor_parallel_size=t, sequence_parallel=t > 1) for t in ranks)
    layout = next((layout for layout in layouts if not refusal(model, layout)), None)
    if layout is None:
        return
    least = 2 * model.layer_parameters(layout) + total(model.rows(layout, "none"))
    if least > cluster.usable_bytes:
        needed = f"one layer of {model.name} with one sequence of {model.seq_length:,} needs {least / GIBIBYTE:.1f} GiB"
        raise ConfigError("memory", f"{needed}, and {cluster.usable_bytes / GIBIBYTE:g} GiB are left for the model")


def nearest_that_fits(model: PlannedModel, cluster: Cluster, global_batch_size: int, found: Found) -> str:
    """Where nothing fits: the memory that the smallest layout needs, and the first power of 2 times the GPUs that fits."""
    least = found.nearest[0]
    memory = (least.bytes + cluster.allowance_bytes) / GIBIBYTE
    needed = f"with {memory:.1f} GiB a GPU {layout_text(least.layout)} would fit"
    for factor in (2, 4, 8, 16):
        try:
            more = replace(cluster, gpus=factor * cluster.gpus)
            plans = find_plans(model, more, global_batch_size, keep=1).plans
        except ConfigError:
            continue
        if plans:
            return f"{needed}; on {more.gpus:,} GPUs {plan_text(plans[0])} fits"
    return f"{needed}; up to {16 * cluster.gpus:,} GPUs nothing does"


def half_the_gpus(model: PlannedModel, cluster: Cluster, global_batch_size: int) -> str:
    """What half the GPUs would do."""
    if cluster.gpus % 2:
        return "half the GPUs: their number is odd"
    fewer = cluster.gpus // 2
    return _outcome(f"half the GPUs ({fewer})", lambda: (model, replace(cluster, gpus=fewer)), global_batch_size)


def twice_the_sequence(model: PlannedModel, cluster: Cluster, global_batch_size: int) -> str:
    """What sequences of twice the length would take."""
    length = 2 * model.seq_length
    what = f"twice the sequence ({length:,})"
    return _outcome(what, lambda: (model.with_sizes(seq_length=length), cluster), global_batch_size)


def _outcome(what: str, changed: Callable[[], tuple[PlannedModel, Cluster]], global_batch_size: int) -> str:
    try:
        model, cluster = changed()
        found = find_plans(model, cluster, global_batch_size, keep=1)
    except ConfigError as error:
        return f"{what}: {error}"
    if found.plans:
        best = found.plans[0]
        return f"{what}: fits, {best.seconds.total:.2f} s a step by {plan_text(best)}"
    return f"{what}: nothing fits; nearest: {refusal_text(model, found.nearest[0], cluster)}"
