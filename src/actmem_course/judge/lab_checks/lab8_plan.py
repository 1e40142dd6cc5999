"""Lab 8's plans, judged by the planner's bill of the fullest rank.

No cases: every plan that fits and is fast enough is right.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedModel, planned_model_of
from actmem.plan.rank_bill import rank_bill, refusal
from actmem.plan.search import LARGEST_MICRO_BATCH, Plan, Refused, bill_of, find_plans
from actmem.plan.step_time import DEVICES, GIBIBYTE, Cluster
from actmem.verify import COUNTED_PARTS, verify_plan
from actmem_course.judge.cases.lab8_plan import STATE_PARTS
from actmem_course.judge.compare import check_whole_number
from actmem_course.judge.reward import BarsReward, Measure, Reward
from actmem_course.judge.solutions.lab8_plan import JOBS
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

#: A plan that takes longer than the fastest by more than this is no answer.
MOST_BEHIND = 0.15
#: What a plan of the lab doesn't choose.
_FIXED = {"num_model_chunks": 1, "context_parallel_size": 1}


def check_plan_of(b: Bench) -> str:
    """Raises Wrong for the first job whose plan doesn't fit or is slow; how far each is behind the fastest."""
    remarks = []
    for job in JOBS:
        b.progress(f"searching for the fastest plan of the {job} model")
        plan, best = judged_plan(job, b["plan_of"](job)), fastest_plan(job)
        behind = plan.seconds.total / best.seconds.total - 1
        spent, least = asdict(plan.seconds), asdict(best.seconds)
        if behind > MOST_BEHIND:
            waited_for = spent.keys() - {"hidden"}
            part = max(waited_for, key=lambda name: spent[name] - least[name])
            raise Wrong(
                f"{job}: it fits, with {_gib(_cluster(job).usable_bytes - plan.bytes)} to spare, but a step takes {plan.seconds.total:.1f} s, {behind:.1%} longer "
                f"than with the fastest plan; at most {MOST_BEHIND:.0%} are allowed. Most of it is in “{part}”: {spent[part]:.1f} s instead of {least[part]:.1f} s"
            )
        remarks.append(
            f"{job} {plan.seconds.total:.1f} s a step, "
            + (f"{behind:.1%} behind the fastest" if behind else "the fastest")
        )
    return "; ".join(remarks)


def judged_plan(job: str, answer: Any) -> Plan:
    """The plan that an answer describes.  Raises Wrong if it is none, or if its bill doesn't fit."""
    model, cluster, recompute, sizes = *_asked(job), *_sizes(job, answer)
    batch = JOBS[job]["global_batch_size"]
    if reason := _cannot_share(model, sizes):
        raise Wrong(f"{job}: {reason}")
    found = find_plans(model.with_modes([recompute]), cluster, batch, 1, {**sizes, **_FIXED}, windows=False)
    if not found.plans:
        raise Wrong(f"{job}: {overflow_text(model, found.nearest[0], cluster)}")
    return found.plans[0]


def _cannot_share(model: PlannedModel, sizes: Mapping[str, int]) -> str:
    """Why ranks can't share the model's layers or heads as the sizes say; empty if they can."""
    t, p, b = (sizes[name] for name in ("tensor_parallel_size", "pipeline_parallel_size", "micro_batch_size"))
    return refusal(model, Layout(1, t, p, b, sequence_parallel=bool(sizes["sequence_parallel"])))


@cache
def fastest_plan(job: str) -> Plan:
    """The fastest plan among those that an answer can describe."""
    model, cluster = _asked(job)
    return find_plans(model, cluster, JOBS[job]["global_batch_size"], 1, _FIXED, windows=False).plans[0]


def overflow_text(model: PlannedModel, refused: Refused, cluster: Cluster) -> str:
    """The line of the bill at which the memory is full, by how much the bill ends above it, and its three largest lines."""
    bill = rank_bill(model, refused.layout, refused.recompute, refused.num_microbatches, refused.pipeline_rank)
    lines = [
        (f"{part}: {row.term}" if part != row.term else part, row.bytes)
        for part, rows in bill.parts.items()
        for row in rows
    ]
    so_far, full_at = 0, ""
    for name, size in lines:
        so_far += size
        if so_far > cluster.usable_bytes:
            full_at = name
            break
    largest = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(lines, key=lambda line: -line[1])[:3])
    return (
        f"it doesn't fit: rank {refused.pipeline_rank}'s bill passes {_gib(cluster.usable_bytes)} at the line “{full_at}” and ends "
        f"{_gib(bill.bytes - cluster.usable_bytes)} above it. Its largest lines: {largest}"
    )


def _asked(job: str) -> tuple[PlannedModel, Cluster]:
    wanted = JOBS[job]
    cluster = Cluster(wanted["gpus"], wanted["memory_gib"] * GIBIBYTE, device=DEVICES[wanted["device"]])
    return planned_model_of(wanted["model"]), cluster


def _cluster(job: str) -> Cluster:
    return _asked(job)[1]


def _sizes(job: str, answer: Any) -> tuple[str, dict[str, int]]:
    """The recomputation and the sizes of an answer.  Raises Wrong unless they can be a plan of the job."""
    names = ("tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "zero_stage", "micro_batch_size")
    if not isinstance(answer, Mapping):
        missing = ": is a return missing?" if answer is None else ""
        raise Wrong(f"{job}: expected a dict, got {type(answer).__name__}{missing}")
    for name in (*names, "recompute"):
        if name not in answer:
            raise Wrong(f"{job}: the plan has no {name!r}")
    if unknown := [name for name in answer if name not in (*names, "recompute")]:
        raise Wrong(f"{job}: a plan has no {unknown[0]!r} here")
    sizes = {name: check_whole_number(f"{job}: {name}", answer[name]) for name in names if name != "sequence_parallel"}
    try:
        sizes["sequence_parallel"] = operator.index(answer["sequence_parallel"])
        assert sizes["sequence_parallel"] in (0, 1)
    except (TypeError, AssertionError):
        raise Wrong(f"{job}: sequence_parallel must be True or False, not {answer['sequence_parallel']!r}") from None
    model, cluster = _asked(job)
    t, p, b = (sizes[name] for name in (names[0], names[2], names[4]))
    if min(t, p, b) < 1:
        raise Wrong(f"{job}: sizes are at least 1")
    if t > cluster.per_node or cluster.per_node % t:
        raise Wrong(f"{job}: tensor_parallel_size must divide the {cluster.per_node} GPUs of a node, got {t}")
    if cluster.gpus % (t * p):
        raise Wrong(f"{job}: t · p = {t} · {p} must divide the {cluster.gpus} GPUs")
    if b > LARGEST_MICRO_BATCH:
        raise Wrong(f"{job}: a microbatch of more than {LARGEST_MICRO_BATCH} sequences only needs more memory")
    dp, batch = cluster.gpus // (t * p), JOBS[job]["global_batch_size"]
    if batch % (dp * b):
        raise Wrong(
            f"{job}: {dp} data-parallel ranks with microbatches of {b} must divide the {batch} sequences of a step"
        )
    if sizes["zero_stage"] not in range(4):
        raise Wrong(f"{job}: zero_stage must be 0, 1, 2 or 3, not {sizes['zero_stage']}")
    if answer["recompute"] not in model.recompute_modes:
        raise Wrong(f"{job}: recompute must be one of {', '.join(model.recompute_modes)}, not {answer['recompute']!r}")
    # One rank alone has nothing to divide: any answer means the same.
    if t == 1:
        sizes["sequence_parallel"] = 0
    if dp == 1:
        sizes["zero_stage"] = 0
    return answer["recompute"], sizes


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.1f} GiB"


def lab8_reward(b: Bench) -> Reward:
    """The learner's plan of the first job, run on an emulated rank: its bill's lines beside the counted ones."""
    job = next(iter(JOBS))
    model, cluster = _asked(job)
    plan = judged_plan(job, b["plan_of"](job))
    b.progress("one emulated rank runs your plan")
    compared = verify_plan(model, plan)
    lines = [*compared.matched, *compared.changed, *compared.missing, *compared.extra]
    largest = sorted(lines, key=lambda line: -(line.predicted or 0))[:8]
    measures = [
        Measure(line.term, "B", {"formula": line.predicted or 0, "measured": line.measured or 0}) for line in largest
    ]
    rest = [line for line in lines if line not in largest]
    sums = [sum(getattr(line, side) or 0 for line in rest) for side in ("predicted", "measured")]
    measures.append(Measure(f"{len(rest)} more lines", "B", dict(zip(("formula", "measured"), sums))))
    parts = bill_of(model, plan).by_part()
    remark = (
        f"Of {_gib(cluster.usable_bytes)} the plan takes {_gib(plan.bytes)}; weights, gradients and optimizer states are "
        f"{_gib(sum(parts[part] for part in STATE_PARTS))} of them. Counted: {', '.join(COUNTED_PARTS)}; buffers and the transient come on top."
    )
    return BarsReward(
        f"Your plan of the {job} model, run on one emulated rank", tuple(measures), remark, one_scale=True
    )
