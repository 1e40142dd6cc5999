"""Lab 8's bytes: what ZeRO leaves on a rank, by the planner's bill, and the largest microbatch that fits beside it.

No cases: a wrong number is explained by what it would be right for, however it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from actmem.plan.layout import Layout
from actmem.plan.planned_models import PlannedModel, planned_model_of
from actmem.plan.rank_bill import static_lines
from actmem_course.judge.lab_checks.ratios import check_whole_number
from actmem_course.judge.solutions.lab8_plan import largest_micro_batch_size
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

#: Parts of a bill that ZeRO divides.
STATE_PARTS = ("weights", "gradients", "optimizer states")


def bill_states(layout: Layout, model: PlannedModel) -> tuple[int, dict[str, int]]:
    """Parameters of pipeline rank 0, and its bill's bytes of weights, gradients and optimizer states."""
    alone = static_lines(model, Layout(1, layout.tensor_parallel_size, zero_stage=0), 0)
    parameters = sum(size for part, _, size, _ in alone if part == "weights") // 2
    sizes = dict.fromkeys(STATE_PARTS, 0)
    for part, _, size, _ in static_lines(model, layout, 0):
        if part in sizes:
            sizes[part] += size
    return parameters, sizes


def check_rank_state_bytes(b: Bench) -> None:
    model = planned_model_of("22b")
    for t, dp, stage in (
        (1, 1, 0),
        (1, 7, 0),
        (8, 7, 1),
        (8, 7, 2),
        (8, 7, 3),
        (2, 64, 1),
        (4, 3, 3),
        (8, 5, 3),
        (8, 9, 2),
        (8, 11, 3),
        (8, 13, 1),
    ):
        n, true = bill_states(Layout(dp, t, zero_stage=stage), model)
        answer = b["rank_state_bytes"](n, dp, stage)
        if not isinstance(answer, Mapping):
            missing = ": is a return missing?" if answer is None else ""
            raise Wrong(f"expected a dict of bytes by name, got {type(answer).__name__}{missing}")
        if set(answer) != set(STATE_PARTS):
            raise Wrong(
                f"expected exactly the names {', '.join(STATE_PARTS)}, got {', '.join(map(str, answer)) or 'none'}"
            )
        case = f"{n:,} parameters, {dp} data-parallel ranks, ZeRO stage {stage}"
        for part in STATE_PARTS:
            found = check_whole_number(part, answer[part])
            if found != true[part]:
                why = _explain_state(part, found, true[part], n, dp, stage)
                raise Wrong(f"{case}: {part} take {true[part]:,} B in the bill, not {found:,} B{why}")


def _explain_state(part: str, found: int, true: int, n: int, dp: int, stage: int) -> str:
    each = true // (n if true % n == 0 else -(-n // dp))
    share, from_stage = -(-n // dp), {"weights": 3, "gradients": 2, "optimizer states": 1}[part]
    mistakes = {
        f": stage {stage} leaves them whole on every rank; they are divided from stage {from_stage} on": each * share,
        f": from stage {from_stage} on they are divided among the data-parallel ranks": each * n,
        ": the fullest rank has one parameter more where they don't divide evenly: round the share up": each * (n // dp),
        ": divide the parameters and round up; then multiply by the bytes of each": -(-each * n // dp),
        ": gradients are added up in float32, 4 bytes each": true // 2 if part == "gradients" else -1,
        ": Adam keeps a float32 copy of the weights besides its two averages": true * 2 // 3 if part == STATE_PARTS[2] else -1,
        ": weights have 16 bits; the float32 copy belongs to the optimizer": 2 * true if part == "weights" else -1,
    }  # fmt: skip
    return next((why for why, value in mistakes.items() if value == found), "")


def check_largest_micro_batch_size(b: Bench) -> None:
    cases = (
        (100, 20, 10, 1, 8), (100, 20, 10, 2, 8), (100, 20, 10, 4, 8), (90, 20, 10, 4, 12), (100, 20, 5, 8, 16), (30, 20, 11, 2, 4),
        (10, 20, 1, 1, 4), (60, 20, 10, 4, 4), (100, 0, 10, 3, 10), (100, 0, 12, 1, 10),
    )  # fmt: skip
    wrong: list[tuple[tuple[int, ...], int]] = []
    for case in cases:
        found = check_whole_number("the result", b["largest_micro_batch_size"](*case))
        if found != largest_micro_batch_size(*case):
            wrong.append((case, found))
    if wrong:
        (memory, fixed, each, p, sequences), found = wrong[0]
        raise Wrong(
            f"{memory} B of memory, {fixed} B fixed, {each} B a sequence, p={p}, {sequences} sequences: {_explain_micro_batch(wrong)}"
        )


def _explain_micro_batch(wrong: list[tuple[tuple[int, ...], int]]) -> str:
    """The mistake in the first case that came out wrong, and that fits in the others."""
    (memory, fixed, each, p, sequences), found = wrong[0]
    right = largest_micro_batch_size(memory, fixed, each, p, sequences)

    def largest(limit) -> bool:
        """Would the largest b under another limit give every wrong answer?"""
        return all(
            result == max((b for b in range(1, case[4] + 1) if case[4] % b == 0 and limit(*case, b)), default=0)
            for case, result in wrong
        )

    if right == 0:
        return f"not even a microbatch of one sequence fits, so the result must be 0, not {found}"
    if found < 1:
        return f"a microbatch of {right} fits, so the result must not be {found}"
    if sequences % found:
        return f"{sequences} sequences can't be split into whole microbatches of {found}"
    if largest(lambda m, x, e, p, n, b: x + b * e <= m):
        return f"the stage holds min(p, n) microbatches at once, not one: {found} doesn't fit"
    if largest(lambda m, x, e, p, n, b: x + p * b * e <= m):
        return f"with a microbatch of {right} there are only {sequences // right} of them, so fewer than p are in flight: {right} fits"
    if largest(lambda m, x, e, p, n, b: x + min(p, n // b) * b * e < m):
        return f"{right} takes exactly the memory, and that fits: compare with <="
    if largest(lambda m, x, e, p, n, b: min(p, n // b) * b * e <= m):
        return "fixed_bytes takes memory too"
    taken = fixed + min(p, -(-sequences // found)) * found * each
    return f"{found} takes {taken} B; {right} is the largest that fits"
