"""Lab 8: its cases, the functions that test a learner's answers.  Tests compare our answers with the planner's bill."""

from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import check_whole_number
from actmem_course.judge.solutions.lab8_plan import rank_state_bytes as rank_state_bytes_of
from actmem_course.judge.term_tables import Pairs, check_terms, checked_terms
from actmem_course.judge.verdict import Fault, Wrong

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
    answers = [checked_terms(r["rank_state_bytes"](*sizes), STATE_PARTS) for sizes in STATES]
    check_terms(answers, [rank_state_bytes_of(*sizes) for sizes in STATES], _fault_of_states)


def _fault_of_states(part: str, pairs: Pairs) -> Fault:
    """Describe wrong bytes by how many there are for a parameter, or else by the first wrong case."""
    (undivided, _), (first, each, reason) = pairs[0], _STATES[part]
    if undivided != each * STATES[0][0]:
        return Fault(f"take {undivided / STATES[0][0]:g} bytes a parameter; expected {each}", cause=reason)
    n, dp, stage, answer, true = next((*sizes, *pair) for sizes, pair in zip(STATES, pairs) if pair[0] != pair[1])
    case = f"{n:,} parameters, {dp} data-parallel ranks and ZeRO stage {stage}"
    cause = f"ZeRO divides them by data_parallel_size from stage {first} on, the parameters rounded up"
    return Fault(f"are {answer:,} B for {case}; expected {true:,}", cause=cause)


def largest_micro_batch_size(r: CaseRun) -> None:
    for memory, fixed, each, p, sequences in MEMORIES:
        case = f"{memory} B of memory, {fixed} B fixed, {each} B a sequence, {p=}, {sequences} sequences"
        answer = check_whole_number("the result", r["largest_micro_batch_size"](memory, fixed, each, p, sequences))
        if answer > 0 and sequences % answer:
            cause = f"{sequences} are no whole number of microbatches of {answer}"
            raise Wrong(f"{case}: the result is {answer}", cause=cause)
        r.see_number(case, answer)
