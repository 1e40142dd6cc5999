"""Lab 8: for which sizes 8.1 and 8.2 are judged, and the mistakes that are edits of ours, which the planner's bill agrees with."""

from __future__ import annotations

from actmem_course.judge.case import CaseRun
from actmem_course.judge.lab_checks.ratios import checked_terms

#: Parts of a bill that ZeRO divides.
STATE_PARTS = ("weights", "gradients", "optimizer states")
#: Parameters of a rank, data-parallel ranks, ZeRO stage.
STATES = (
    (10**10, 1, 0), (10**10, 7, 0), (10**9, 7, 1), (10**9, 7, 2), (10**9, 7, 3), (10**9, 64, 1), (10**9, 5, 3), (10**9, 9, 2),
    (10**9, 11, 3), (10**9, 13, 1),
)  # fmt: skip
#: Memory, fixed, each sequence, p, sequences of a step.
MEMORIES = (
    (100, 20, 10, 1, 8), (100, 20, 10, 2, 8), (100, 20, 10, 4, 8), (90, 20, 10, 4, 12), (100, 20, 5, 8, 16), (30, 20, 11, 2, 4),
    (10, 20, 1, 1, 4), (60, 20, 10, 4, 4), (100, 0, 10, 3, 10), (100, 0, 12, 1, 10),
)  # fmt: skip


def rank_state_bytes(r: CaseRun) -> None:
    for n, dp, stage in STATES:
        found = checked_terms(r["rank_state_bytes"](n, dp, stage), STATE_PARTS)
        for part in STATE_PARTS:
            r.see_number(f"{n:,} parameters, {dp} data-parallel ranks, ZeRO stage {stage}, {part}", found[part])


def largest_micro_batch_size(r: CaseRun) -> None:
    for memory, fixed, each, p, sequences in MEMORIES:
        case = f"{memory} B of memory, {fixed} B fixed, {each} B a sequence, {p=}, {sequences} sequences"
        r.see_number(case, r["largest_micro_batch_size"](memory, fixed, each, p, sequences))


_SHARE, _FLIGHT = "-(-num_parameters // data_parallel_size)", "min(pipeline_parallel_size, sequences // b)"
_UP = "the fullest rank has one parameter more where they don't divide evenly: round the share up"
_ROUNDED = "(-(-{0} * num_parameters // data_parallel_size) if zero_stage >= {1} else {0} * num_parameters)"
_PARTS = ((2, 3), (4, 2), (12, 1))
_BYTES_ROUNDED = " ;; ".join(
    f"{each} * (share if zero_stage >= {stage} else num_parameters) -> {_ROUNDED.format(each, stage)}"
    for each, stage in _PARTS
)
_LEFT_WHOLE = "{} are divided from stage {} on; the stages before leave them whole on every rank"
_DIVIDED = "from stage {} on {} are divided among the data-parallel ranks"
MISTAKES = {
    "8.1": f"""
        {_SHARE} -> num_parameters // data_parallel_size | {_UP}
        {_SHARE} -> (num_parameters + data_parallel_size // 2) // data_parallel_size | {_UP}
        {_SHARE} -> num_parameters // data_parallel_size + 1 | where the parameters divide evenly, no rank has one more
        {_BYTES_ROUNDED} | divide the parameters and round up; then multiply by the bytes of each
        "gradients": 4 -> "gradients": 2 | gradients are added up in float32, 4 bytes each
        "optimizer states": 12 -> "optimizer states": 8 | Adam keeps a float32 copy of the weights besides its two averages
        "weights": 2 -> "weights": 4 | weights have 16 bits; the float32 copy belongs to the optimizer
        zero_stage >= 3 -> zero_stage >= 1 | {_LEFT_WHOLE.format("weights", 3)}
        zero_stage >= 3 -> zero_stage >= 2 | {_LEFT_WHOLE.format("weights", 3)}
        zero_stage >= 2 -> zero_stage >= 1 | {_LEFT_WHOLE.format("gradients", 2)}
        zero_stage >= 3 -> False | {_DIVIDED.format(3, "weights")}
        zero_stage >= 2 -> zero_stage >= 3 | {_DIVIDED.format(2, "gradients")}
        zero_stage >= 2 -> False | {_DIVIDED.format(2, "gradients")}
        zero_stage >= 1 -> zero_stage >= 2 | {_DIVIDED.format(1, "optimizer states")}
        zero_stage >= 1 -> zero_stage >= 3 | {_DIVIDED.format(1, "optimizer states")}
        zero_stage >= 1 -> False | {_DIVIDED.format(1, "optimizer states")}
        zero_stage >= 1 -> True | {_LEFT_WHOLE.format("optimizer states", 1)}
    """,
    "8.2": f"""
        {_FLIGHT} -> 1 | the stage holds min(p, n) microbatches at once, not one
        {_FLIGHT} -> pipeline_parallel_size | with a large microbatch there are only a few of them, so fewer than p are in flight: min(p, n)
        {_FLIGHT} -> min(pipeline_parallel_size - 1, sequences // b) | the first stage holds p microbatches, its own in backward too, not p − 1
        {_FLIGHT} -> sequences // b | the stage holds min(p, n) microbatches at once, not all n
        <= memory_bytes -> < memory_bytes | what takes exactly the memory fits: compare with <=
        if fixed_bytes + in_flight -> if in_flight | fixed_bytes takes memory too
        if sequences % b: -> if False: | the sequences can't be split into whole microbatches of that size
        fitting = 0 -> fitting = 1 | not even a microbatch of one sequence fits, so the result must be 0
        in_flight * b * bytes -> in_flight * bytes | a microbatch of b sequences keeps b times bytes_per_sequence
        fitting = b -> fitting = fitting or b | this is the smallest that fits; expected the largest
        range(1, sequences + 1) -> range(1, sequences) | one microbatch of all sequences is left out
    """,
}
