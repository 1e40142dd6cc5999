"""Chapter 9: the fullest GPU of the fastest plans, and what to change where none fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import Any

from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing, chart, line, log_scale, points, scale
from actmem_course.figures.style import BLUE, FILLS, INK
from actmem_course.figures.units import size_text
from actmem_course.others.nanotron import NanotronRun
from actmem_tools.plan.plan_report import layout_text, plan_text
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Plan, bill_of, find_plans
from actmem_tools.plan.step_time import GIBIBYTE, Cluster

#: Parts of a bill, from the left; what frees bytes again is added to the transient.
_STATES = ("weights", "gradients", "optimizer states")
_REST = ("activations", "logits and loss", "communication buffers", "transient")
PLAN_FILLS = {part: FILLS[part] for part in (*_STATES, *_REST)}

#: Of a step, in the figure of plans.
_SEQUENCES = 512
#: The requests of ``plan_wall``: model, GiB of a GPU, GPUs.  A search takes seconds and a key should take none, so
#: what each finds is stored: by ``python -m actmem_course.figures.ch09_your_model``.
PLANNED = list(product(("llama3-8b", "llama3-70b", "qwen3-32b", "175b"), (40, 80, 141), (16, 64, 256)))
PLANS = "plans.tsv"


def plan_line(name: str, memory: int, gpus: int) -> str:
    """A stored line: the request, whether a plan fits, the plan in words, and its fullest rank's bytes by part.

    The plan is the fastest that fits, or else the nearest.
    """
    model = planned_model_of(name)
    found = find_plans(model, Cluster(gpus, memory * GIBIBYTE), _SEQUENCES, 1)
    fastest = found.plans[0] if found.plans else None
    best = fastest or found.nearest[0]
    words = f"nothing fits; nearest: {layout_text(best.layout)}, {best.recompute}"
    if fastest:
        words = f"{plan_text(fastest)}: {fastest.seconds.total:,.1f} s a step"
    parts = bill_of(model, best).by_part()
    sizes = (max(parts.get(part, 0), 0) for part in PLAN_FILLS)
    return "\t".join(map(str, (name, memory, gpus, bool(found.plans), words, *sizes)))


def stored_plans() -> list[str]:
    """A line for each of PLANNED.  A page has the file in an archive."""
    return resources.files(__package__).joinpath(PLANS).read_text(encoding="utf-8").splitlines()


def stored_plan(name: str, memory: int, gpus: int) -> tuple[dict[str, int], str, bool]:
    """One of PLANNED: bytes of the fullest rank by part, the plan in words, whether it fits."""
    line = stored_plans()[PLANNED.index((name, memory, gpus))]
    fits, words, *sizes = line.split("\t")[3:]
    return dict(zip(PLAN_FILLS, map(int, sizes))), words, fits == "True"


def plan_wall(name: str, memory: int, gpus: Sequence[int] = (16, 64, 256)) -> Drawing:
    """A bar for each number of GPUs: the fullest rank's bill by part, against the memory of one GPU in GiB;
    requests of PLANNED.
    """
    plans = {f"{count:,} GPUs": stored_plan(name, memory, count) for count in gpus}
    parts = {part: {count: sizes[part] for count, (sizes, _, _) in plans.items()} for part in PLAN_FILLS}
    fitting = ", ".join(count for count, (_, _, fits) in plans.items() if fits)
    return bar_chart(
        f"{name} with {memory} GiB a GPU fits on {fitting or 'none of them'}",
        {part: sizes for part, sizes in parts.items() if any(sizes.values())},
        "fullest GPU of the fastest plan, or of the nearest where none fits",
        fills=[fill for part, fill in PLAN_FILLS.items() if any(parts[part].values())],
        about={count: "<br>".join(wrap(plan, 60)) for count, (_, plan, _) in plans.items()},
        limit=("memory of a GPU", memory * GIBIBYTE),
    )


#: What to change if a plan doesn't fit: words, sizes of the layout or an axis to double with half the replicas, and
#: mode.
_AID: dict[str, tuple[dict[str, int], str, str]] = {
    "sequence parallelism": ({"sequence_parallel": True}, "", ""),
    "one sequence a microbatch": ({"micro_batch_size": 1}, "", ""),
    "elementwise recomputation": ({}, "", "elementwise"),
    "full recomputation": ({}, "", "full"),
    "divide gradients too (ZeRO-2)": ({"zero_stage": 2}, "", ""),
    "divide weights too (ZeRO-3)": ({"zero_stage": 3}, "", ""),
    "twice the pipeline stages, half the replicas": ({}, "pipeline_parallel_size", ""),
    "two ranks a sequence, half the replicas": ({}, "context_parallel_size", ""),
}
_START: dict[str, int] = {
    "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 4, "context_parallel_size": 1,
    "num_model_chunks": 1, "micro_batch_size": 2, "sequence_parallel": False, "zero_stage": 1,
}  # fmt: skip


def first_aid(name: str, memory: int) -> Drawing:
    """It doesn't fit: what the fullest GPU holds as one change comes after the other, and the time of a step.

    From one plain layout of 64 GPUs with ``memory`` GiB each.  Each time the change comes next that then frees a GiB
    for the least time.  Bytes and seconds are the planner's.
    """
    model = planned_model_of(name)
    # With room for everything, so that also what does not fit has its seconds.
    roomy = Cluster(64, 100 * memory * GIBIBYTE)

    def plans_of(sizes: dict[str, int], mode: str) -> list[tuple[Plan, dict[str, int], str]]:
        found = find_plans(model.with_modes([mode]), roomy, _SEQUENCES, 1, sizes, False).plans
        return [(plan, sizes, mode) for plan in found]

    (here,) = plans_of(_START, "none")
    start, limit = here[0], Cluster(64, memory * GIBIBYTE).usable_bytes
    held = {layout_text(start.layout): start.bytes}
    left = {words: aid for words, aid in _AID.items() if aid[1] != "context_parallel_size" or model.context_parallel}
    while True:
        plan, sizes, mode = here
        price, following = {}, {}
        for words, (changed, doubled, again) in left.items():
            halved = (
                {doubled: 2 * sizes[doubled], "data_parallel_size": sizes["data_parallel_size"] // 2} if doubled else {}
            )
            if doubled and not halved["data_parallel_size"]:
                continue
            for offer in plans_of({**sizes, **changed, **halved}, again or mode):
                if offer[0].bytes < plan.bytes:
                    following[words] = offer
                    price[words] = (offer[0].seconds.total - plan.seconds.total) / (plan.bytes - offer[0].bytes)
        if not price:
            break
        words = min(price, key=lambda each: price[each])
        here = following[words]
        del left[words]
        longer = f"{100 * (here[0].seconds.total / start.seconds.total - 1):+.1f}%".replace("-", "−")
        held[f"{words}: {longer} time"] = here[0].bytes
    over = start.bytes - limit
    room = f"{size_text(over)} too much" if over > 0 else f"fits, with {size_text(-over)} to spare"
    return bar_chart(
        f"{model.name}, {layout_text(start.layout)}: {room}.<br>Each bar adds a change, the cheapest first",
        {"held": held},
        "held by the fullest GPU",
        limit=("what a plan may use", limit),
    )


_MIB_IN_GIB = 1024


def runs_figure(runs: Sequence[NanotronRun]) -> Drawing:
    """Runs that others logged: predicted over logged, one point each, on the line of equality; below, differences."""
    logged = [run.logged_mib / _MIB_IN_GIB for run in runs]
    predicted = [run.predicted_mib / _MIB_IN_GIB for run in runs]
    percents = [run.difference_percent for run in runs]
    farthest = max(map(abs, percents))
    low, top = min(logged) / 1.2, max(logged) * 1.2
    look: dict[str, Any] = {
        "symbol": "circle", "size": 12, "edge": 1, "hoverinfo": "text",
        "text": [
            f"{run.setting}<br>logged {run.logged_mib:,.2f} MiB, predicted {run.predicted_mib:,.2f} MiB"
            f"<br>{run.difference_percent:+.3f}%, {run.bill.moment}"
            for run in runs
        ],
    }  # fmt: skip
    ticks = [size for size in (1, 2, 5, 10, 20, 50, 100) if low < size < top]
    ends = [math.log10(low), math.log10(top)]
    return chart(
        f"{len(runs)} runs of others, {min(logged):.1f} to {max(logged):.1f} GiB on a GPU:"
        f"<br>no prediction is more than {_outwards(farthest)}% off",
        [
            line("predicted = logged", [low, top], [low, top], INK, None, "dot", 1),
            points(f"nanotron, {len(runs)} runs", logged, predicted, BLUE, **look),
            points("", logged, percents, BLUE, showlegend=False, xaxis="x2", yaxis="y2", **look),
        ],
        f"Predicted over logged peak, {len(runs)} runs, all near the line of equality: "
        + "; ".join(f"{run.setting} {run.logged_mib:,.0f} MiB, {run.difference_percent:+.3f}%" for run in runs)
        + ".",
        height=640,
        xaxis=log_scale("", ticks, range=ends, showticklabels=False),
        yaxis=log_scale("predicted, GiB", ticks, range=ends, domain=[0.42, 1]),
        xaxis2=log_scale("peak that the run logged, GiB", ticks, range=ends, anchor="y2"),
        yaxis2=scale("difference", -1.15 * farthest, 1.15 * farthest, domain=[0, 0.32], ticksuffix="%"),
    )


def _outwards(percent: float) -> str:
    """A bound with two digits, rounded up: what is 2.262% off is within 2.27%, not within 2.26%."""
    return f"{math.ceil(100 * percent) / 100:.2f}"


if __name__ == "__main__":
    Path(__file__).with_name(PLANS).write_text(
        "".join(f"{plan_line(*request)}\n" for request in PLANNED), encoding="utf-8"
    )
