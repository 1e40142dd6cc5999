"""The memory wall with a model of one's own on it: the fastest plan's bill for several numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from actmem.checks import ConfigError
from actmem.plan.bill import Bill
from actmem.plan.explain import layout_text, plan_text
from actmem.plan.hardware import GIBIBYTE, Cluster
from actmem.plan.known_models import planned_model_of
from actmem.plan.planned_model import PlannedModel
from actmem.plan.rank_bill import rank_bill
from actmem.plan.search import bill_of, find_plans
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Fill, size_text

#: Parts of a bill, from the left; what frees bytes again is added to the transient.
PLAN_FILLS = {
    "weights": Fill(GREEN, ""),
    "gradients": Fill(SKY, "-"),
    "optimizer states": Fill(BLUE, "", "#FFFFFF"),
    "activations": Fill(VERMILION, "/"),
    "logits and loss": Fill(ORANGE, "x"),
    "communication buffers": Fill(PURPLE, "."),
    "transient": Fill(YELLOW, "+"),
}


def plan_of_request(model: PlannedModel, cluster: Cluster, global_batch_size: int) -> tuple[Bill | None, str, bool]:
    """The bill of the fastest plan or, if none fits, of the nearest; what it is in words; whether it fits."""
    try:
        found = find_plans(model, cluster, global_batch_size, 1)
    except ConfigError as error:
        return None, str(error), False
    if found.plans:
        best = found.plans[0]
        return bill_of(model, best), f"{plan_text(best)}: {best.seconds.total:,.1f} s a step", True
    near = found.nearest[0]
    bill = rank_bill(model, near.layout, near.recompute, near.num_microbatches, near.pipeline_rank)
    return bill, f"nothing fits; nearest: {layout_text(near.layout)}, {near.recompute}", False


def plan_wall(name: str, memory: int, gpus: Sequence[int] = (16, 64, 256), global_batch_size: int = 512) -> Drawing:
    """A bar for each number of GPUs: the fullest rank's bill by part, against the memory of one GPU in GiB."""
    model = planned_model_of(name)
    plans = {count: plan_of_request(model, Cluster(count, memory * GIBIBYTE), global_batch_size) for count in gpus}
    labels = {count: f"{count:,} GPUs" for count in gpus}
    traces: list[dict] = []
    for part, fill in PLAN_FILLS.items():
        sizes = {count: bill.by_part().get(part, 0) if bill else 0 for count, (bill, _, _) in plans.items()}
        if any(sizes.values()):
            traces.append(
                {
                    "type": "bar", "orientation": "h", "name": part, "marker": fill.marker(),
                    "x": [max(size, 0) / GIBIBYTE for size in sizes.values()], "y": [labels[count] for count in gpus],
                    "customdata": [f"{size_text(sizes[count])}<br>{plans[count][1]}" for count in gpus],
                    "hovertemplate": f"<b>%{{y}}</b>, {part}: %{{customdata}}<extra></extra>",
                }
            )  # fmt: skip
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": f"{memory} GiB", "x": [memory, memory], "y": [-0.6, len(plans) - 0.4],
            "yaxis": "y2", "line": {"color": INK, "width": 2.5, "dash": "dash"}, "hoverinfo": "skip",
        }
    )  # fmt: skip
    fitting = [labels[count] for count in gpus if plans[count][2]]
    verdict = f"fits on {', '.join(fitting)}" if fitting else "fits on none of them"
    largest = max([memory, *(bill.bytes / GIBIBYTE for bill, _, _ in plans.values() if bill)])
    return Drawing(
        traces,
        {
            "title": {"text": f"{model.name} with {memory} GiB a GPU {verdict}"},
            "barmode": "stack",
            "bargap": 0.35,
            "xaxis": {"title": {"text": "fullest GPU of the fastest plan, GiB"}, "range": [0, 1.05 * largest]},
            "yaxis": {"autorange": "reversed"},
            "yaxis2": {"overlaying": "y", "visible": False, "range": [-0.6, len(plans) - 0.4], "fixedrange": True},
            "legend": {"traceorder": "normal"},
            "margin": {"b": 130},
        },
        f"Stacked bars of {model.name}, {memory} GiB a GPU; it {verdict}. "
        + "; ".join(f"{labels[count]}: {plans[count][1]}" for count in gpus)
        + ".",
    )
