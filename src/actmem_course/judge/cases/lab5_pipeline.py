"""Lab 5: for which budgets 5.4 is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

from actmem_course.judge.case import CaseRun

#: Budget, in flight, bytes in full and recomputed.
BUDGETS = (
    (100, 4, 30, 10), (60, 4, 30, 10), (40, 4, 30, 10), (39, 4, 30, 10), (10**6, 4, 30, 10), (119, 4, 30, 10),
    (85, 3, 40, 7), (100, 4, 10, 10), (30, 4, 10, 10),
    (2**62 + 39, 4, 2**60 + 10, 10),  # one byte too few for four, which a float can't tell
)  # fmt: skip


def how_many_fit(r: CaseRun) -> None:
    for budget, flight, full, recomputed in BUDGETS:
        case = f"budget {budget} B, {flight} in flight, {full} B or {recomputed} B each"
        try:
            r.see_number(case, r["how_many_fit"](budget, flight, full, recomputed))
        except ZeroDivisionError:
            if full != recomputed:
                raise
            r.see(f"{case}: the result", "a division by zero", "equal")


_FIT, _SAVES = "left // more) if more else in_flight", " if more else in_flight"
_EXACTLY = (
    "those that keep everything take exactly the budget, and that does not exceed it: compare with <=, not with <"
)
_NONE_FITS = "not even recomputing all fits, so the result must be -1"
MISTAKES = {
    "5.4": f"""
        `{_SAVES}` ->  | recomputing saves nothing there, and full_bytes − recomputed_bytes is 0: as recomputing all fits, all in flight can keep everything
        {_FIT} -> budget_bytes // full_bytes) | budget // full_bytes leaves no room for what the recomputed ones keep
        {_FIT} -> left // full_bytes) | one that keeps everything takes full_bytes − recomputed_bytes more than when it is recomputed, not full_bytes
        min(in_flight, left // more) -> left // more | there are more than are in flight: in_flight is the most
        return -1 -> return 0 | {_NONE_FITS}
        if left < 0: -> if False: | {_NONE_FITS}
        if left < 0 -> if left <= 0 | recomputing all takes exactly the budget, so the result must be 0, not -1
        if left < 0 -> if left <= 0 ;; left // more -> (left - 1) // more | {_EXACTLY}
        min(in_flight, left // more) -> max(0, min(in_flight, (left - 1) // more)) | {_EXACTLY}
        left // more -> left // more + 1 | one too many: the last one that keeps everything does not fit any more
        left // more -> int(left / more) | / makes a float, which is rounded where numbers are large: divide with //
        left // more -> -(-left // more) | the share of the last one is rounded up, and there is no room for it: round down
    """,
}
