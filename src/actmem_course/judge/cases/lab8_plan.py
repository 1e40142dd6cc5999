"""Lab 8: for which sizes 8.1 and 8.2 are judged; ours agree with the planner's bill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import accumulate
from typing import Any

from actmem.config import Parallel
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import another_kind, check_whole_number
from actmem_course.judge.solutions.lab8_plan import JOBS
from actmem_course.judge.solutions.lab8_plan import rank_state_bytes as rank_state_bytes_of
from actmem_course.judge.term_tables import Pairs, check_terms, checked_terms
from actmem_course.judge.verdict import Fault, Wrong, refuse
from actmem_tools.plan.planned_models import PlannedModel, planned_model_of
from actmem_tools.plan.search import LARGEST_MICRO_BATCH, Plan, Refused, bill_of, find_plans, refusal
from actmem_tools.plan.step_time import DEVICES, GIBIBYTE, Cluster

#: Parts of a bill that ZeRO divides.
STATE_PARTS = ("weights", "gradients", "optimizer states")
#: Parameters of a rank, data-parallel ranks, ZeRO stage.
STATES = (
    (10**10, 1, 0), (10**10, 7, 0), (10**9, 7, 1), (10**9, 7, 2), (10**9, 7, 3), (10**9, 64, 1), (10**9, 5, 3),
    (10**9, 9, 2), (10**9, 11, 3), (10**9, 13, 1),
    (2**60 + 3, 2, 3), (3 * 2**58 + 1, 3, 3),  # which a float can't tell
)  # fmt: skip
#: From which stage on ZeRO divides a part, its bytes a parameter, and why so many.
_STATES = {
    "weights": (3, 2, "they have 16 bits, and the float32 copy belongs to the optimizer"),
    "gradients": (2, 4, "they are added up in float32"),
    "optimizer states": (1, 12, "Adam has a float32 copy of the weights and two averages; gradients are a line apart"),
}  # fmt: skip
#: Memory, fixed, each sequence, p, sequences of a step.
MEMORIES = (
    (100, 20, 10, 1, 8), (100, 20, 10, 2, 8), (100, 20, 10, 4, 8), (90, 20, 10, 4, 12), (100, 20, 5, 8, 16),
    (30, 20, 11, 2, 4), (10, 20, 1, 1, 4), (60, 20, 10, 4, 4), (100, 0, 10, 3, 10), (100, 0, 12, 1, 10),
    (200, 20, 10, 4, 60),
    (8 * (2**60 + 1) - 1, 0, 2**60 + 1, 1, 8),  # one byte too few, which a float can't tell
)  # fmt: skip


def rank_state_bytes(r: CaseRun) -> None:
    found = [checked_terms(r["rank_state_bytes"](*sizes), STATE_PARTS) for sizes in STATES]
    check_terms(found, [rank_state_bytes_of(*sizes) for sizes in STATES], _fault_of_states)


def _fault_of_states(part: str, pairs: Pairs) -> Fault:
    """The bytes of a parameter, or the first case that is wrong."""
    (whole, _), (first, each, reason) = pairs[0], _STATES[part]
    if whole != each * STATES[0][0]:
        return Fault(f"take {whole / STATES[0][0]:g} bytes a parameter; expected {each}", cause=reason)
    n, dp, stage, found, true = next((*sizes, *pair) for sizes, pair in zip(STATES, pairs) if pair[0] != pair[1])
    case = f"{n:,} parameters, {dp} data-parallel ranks and ZeRO stage {stage}"
    cause = f"ZeRO divides them by data_parallel_size from stage {first} on, the parameters rounded up"
    return Fault(f"are {found:,} B for {case}; expected {true:,}", cause=cause)


def largest_micro_batch_size(r: CaseRun) -> None:
    for memory, fixed, each, p, sequences in MEMORIES:
        case = f"{memory} B of memory, {fixed} B fixed, {each} B a sequence, {p=}, {sequences} sequences"
        found = check_whole_number("the result", r["largest_micro_batch_size"](memory, fixed, each, p, sequences))
        if found > 0 and sequences % found:
            whole = f"{sequences} are no whole number of microbatches of {found}"
            raise Wrong(f"{case}: the result is {found}", cause=whole)
        r.see_number(case, found)


#: A plan that takes longer than the fastest by more than this is no answer.
MOST_BEHIND = 0.15
#: What a plan of the lab doesn't choose.
_FIXED = {"num_model_chunks": 1, "context_parallel_size": 1}
_SIZES = ("tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "zero_stage", "micro_batch_size")


def plan_of(r: CaseRun) -> str:
    """Every plan that fits and is fast enough is right, so each is judged by itself; a remark says how far it is
    behind the fastest."""
    remarks = []
    for job in JOBS:
        r.progress(f"searching for the fastest plan of the {job} model")
        plan, best, cluster = judged_plan(job, r["plan_of"](job)), _fastest_plan(job), asked(job)[1]
        seconds, behind = plan.seconds.total, plan.seconds.total / best.seconds.total - 1
        spent, least = asdict(plan.seconds), asdict(best.seconds)
        part = max(spent.keys() - {"hidden"}, key=lambda name: spent[name] - least[name])
        if behind > MOST_BEHIND:
            raise Wrong(
                f"{job}: it fits, with {gib(cluster.usable_bytes - plan.bytes)} to spare, but a step takes "
                f"{seconds:.1f} s, {behind:.1%} longer than with the fastest plan; {MOST_BEHIND:.0%} are allowed",
                cause=f"“{part}” takes {spent[part]:.1f} s, where the fastest plan's takes {least[part]:.1f} s",
            )
        remarks.append(f"{job} {seconds:.1f} s a step, {f'{behind:.1%} behind ' if behind else ''}the fastest")
    return "; ".join(remarks)


def judged_plan(job: str, answer: Any) -> Plan:
    """The plan that an answer describes.  Raises Wrong if it is none, or if its bill doesn't fit."""
    model, cluster = asked(job)
    t, sequence_parallel, p, zero_stage, b = sizes = _sizes(job, answer)
    dp, batch = cluster.gpus // (t * p), JOBS[job]["global_batch_size"]
    modes, recompute = model.recompute_modes, answer["recompute"]
    ranks = f"{job}: {dp} data-parallel ranks with microbatches of {b} must divide the {batch} sequences of a step"
    node = f"{job}: tensor_parallel_size must divide the {cluster.per_node} GPUs of a node, got {t}"
    large = f"{job}: a microbatch of more than {LARGEST_MICRO_BATCH} sequences only needs more memory"
    refuse((
        (t > cluster.per_node or cluster.per_node % t, node),
        (cluster.gpus % (t * p), f"{job}: t · p = {t} · {p} must divide the {cluster.gpus} GPUs"),
        (b > LARGEST_MICRO_BATCH, large),
        (dp and batch % (dp * b), ranks),
        (zero_stage not in range(4), f"{job}: zero_stage must be 0, 1, 2 or 3, not {zero_stage}"),
        (recompute not in modes, f"{job}: recompute must be one of {', '.join(modes)}, not {recompute!r}"),
    ))  # fmt: skip
    if reason := refusal(model, Parallel(t, bool(sequence_parallel and t > 1), p, micro_batch_size=b)):
        raise Wrong(f"{job}: {reason}")
    chosen = {**dict(zip(_SIZES, sizes)), "recompute": recompute}
    plan = _planned(job, chosen)
    if isinstance(plan, Refused):
        symptom, cause = _overflow_text(model, plan, cluster)
        raise Wrong(f"{job}: {symptom}", cause=cause)
    return plan


def _planned(job: str, chosen: Mapping[str, Any]) -> Plan | Refused:
    """The plan with these choices, or what it needs if it doesn't fit.  Raises ConfigError if there is none."""
    model, cluster = asked(job)
    t, p = chosen["tensor_parallel_size"], chosen["pipeline_parallel_size"]
    # One rank alone has nothing to divide: any answer means the same.
    fixed = {name: chosen[name] for name in _SIZES} | {
        "sequence_parallel": bool(chosen["sequence_parallel"] and t > 1),
        "zero_stage": chosen["zero_stage"] * (cluster.gpus > t * p),
    }
    modes, batch = model.with_modes([chosen["recompute"]]), JOBS[job]["global_batch_size"]
    found = find_plans(modes, cluster, batch, 1, fixed | _FIXED)
    return found.plans[0] if found.plans else found.nearest[0]


def _sizes(job: str, answer: Any) -> list[int]:
    """The sizes of an answer, in the order of ``_SIZES``.  Raises Wrong unless they can be a plan's."""
    if not isinstance(answer, Mapping):
        raise Wrong(f"{job}: {another_kind('a dict', answer)}")
    names = (*_SIZES, "recompute")
    refuse((name not in answer, f"{job}: the plan has no {name!r}") for name in names)
    refuse((name not in names, f"{job}: a plan has no {name!r} here") for name in answer)
    flag = answer["sequence_parallel"]
    numbers = {**answer, "sequence_parallel": int(flag) if isinstance(flag, bool) else flag}
    sizes = [check_whole_number(f"{job}: {name}", numbers[name]) for name in _SIZES]
    t, sequence_parallel, p, _, b = sizes
    refuse((
        (sequence_parallel not in (0, 1), f"{job}: sequence_parallel must be True or False, not {flag!r}"),
        (min(t, p, b) < 1, f"{job}: sizes are at least 1"),
    ))  # fmt: skip
    return sizes


@cache
def _fastest_plan(job: str) -> Plan:
    """The fastest plan among those that an answer can describe."""
    model, cluster = asked(job)
    return find_plans(model, cluster, JOBS[job]["global_batch_size"], 1, _FIXED).plans[0]


def _overflow_text(model: PlannedModel, refused: Refused, cluster: Cluster) -> tuple[str, str]:
    """By how much the bill ends above the memory; at which line it is full, and the three largest lines."""
    bill = bill_of(model, refused)
    lines = [
        (f"{part}: {row.term}" if part != row.term else part, row.bytes)
        for part, rows in bill.parts.items()
        for row in rows
    ]
    ends = accumulate(size for _, size in lines)
    full_at = next(name for (name, _), end in zip(lines, ends) if end > cluster.usable_bytes)
    largest = ", ".join(f"{name} {gib(size)}" for name, size in sorted(lines, key=lambda line: -line[1])[:3])
    return (
        f"it doesn't fit: rank {refused.pipeline_rank}'s bill ends {gib(bill.bytes - cluster.usable_bytes)} above "
        f"{gib(cluster.usable_bytes)} ({gib(cluster.memory_bytes)} less {gib(cluster.allowance_bytes)} that stay free)",
        f"it is full at the line “{full_at}”. The largest lines: {largest}",
    )


def asked(job: str) -> tuple[PlannedModel, Cluster]:
    """The model and the GPUs of a job."""
    wanted = JOBS[job]
    cluster = Cluster(wanted["gpus"], wanted["memory_gib"] * GIBIBYTE, device=DEVICES[wanted["device"]])
    return planned_model_of(wanted["model"]), cluster


def gib(size: int) -> str:
    """Bytes, in words."""
    return f"{size / GIBIBYTE:.1f} GiB"
