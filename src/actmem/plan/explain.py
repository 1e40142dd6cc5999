"""Why plans were refused, what the nearest would need, and what half the GPUs or twice the sequence would take."""

from __future__ import annotations

from dataclasses import replace

from actmem.checks import ConfigError
from actmem.plan.every_layout import divisors
from actmem.plan.hardware import GIBIBYTE, Cluster
from actmem.plan.layout import Layout
from actmem.plan.outcome import Found, Plan, Refused
from actmem.plan.planned_model import PlannedModel
from actmem.plan.rank_bill import rank_bill
from actmem.plan.search import find_plans
from actmem.rows import total


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
    bill = rank_bill(model, refused.layout, refused.recompute, refused.num_microbatches, refused.pipeline_rank)
    largest = sorted(bill.by_part().items(), key=lambda part: -part[1])[:2]
    parts = ", ".join(f"{name} {size / GIBIBYTE:.1f}" for name, size in largest)
    over = (refused.bytes - cluster.usable_bytes) / GIBIBYTE
    return (
        f"{layout_text(refused.layout)}: {over:.1f} GiB too much on pipeline rank {refused.pipeline_rank} "
        f"with recomputation {refused.recompute} ({parts} GiB)"
    )


def check_memory_of_one_layer(model: PlannedModel, cluster: Cluster) -> None:
    """Raise ConfigError if a GPU can't even hold one layer: its 16-bit weights, and what it keeps of one sequence.

    Divided among all GPUs of a node, or as many of them as can share the layer.
    """
    least = None
    for t in reversed(divisors(cluster.per_node, min(cluster.per_node, cluster.gpus))):
        layout = Layout(tensor_parallel_size=t, sequence_parallel=t > 1)
        if not model.refusal(layout):
            kept = total(model.layer_rows(layout, "none"))
            least = 2 * model.layer_parameters(layout) + kept
            break
    if least is not None and least > cluster.usable_bytes:
        needed = f"one layer of {model.name} with one sequence of {model.seq_length:,} needs {least / GIBIBYTE:.1f} GiB"
        raise ConfigError("memory", f"{needed}, and {cluster.usable_bytes / GIBIBYTE:g} GiB are left for the model")


def nearest_that_fits(model: PlannedModel, cluster: Cluster, global_batch_size: int, found: Found) -> str:
    """Where nothing fits: the memory that the smallest layout needs, and the first power of 2 times the GPUs that fits."""
    least = found.nearest[0]
    needed = (
        f"with {(least.bytes + cluster.allowance_bytes) / GIBIBYTE:.1f} GiB a GPU {layout_text(least.layout)} would fit"
    )
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
    try:
        smaller = replace(cluster, gpus=fewer)
        found = find_plans(model, smaller, global_batch_size, keep=1)
    except ConfigError as error:
        return f"half the GPUs: {error}"
    return f"half the GPUs ({fewer}): {_outcome(model, found, smaller)}"


def twice_the_sequence(model: PlannedModel, cluster: Cluster, global_batch_size: int) -> str:
    """What sequences of twice the length would take."""
    length = 2 * model.seq_length
    try:
        longer = model.with_sequence(length)
        found = find_plans(longer, cluster, global_batch_size, keep=1)
    except ConfigError as error:
        return f"twice the sequence ({length:,}): {error}"
    return f"twice the sequence ({length:,}): {_outcome(longer, found, cluster)}"


def _outcome(model: PlannedModel, found: Found, cluster: Cluster) -> str:
    if found.plans:
        best = found.plans[0]
        return f"fits, {best.seconds.total:.2f} s a step by {plan_text(best)}"
    return f"nothing fits; nearest: {refusal_text(model, found.nearest[0], cluster)}"
