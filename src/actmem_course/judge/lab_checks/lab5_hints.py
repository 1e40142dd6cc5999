"""Hints of lab 5, from a nudge to nearly the answer."""

ONE_FORWARD_ONE_BACKWARD = (
    "The last rank can run the backward of a microbatch right after its forward. How many forwards can rank r run until the first "
    "gradient is back?",
    "Three phases: some forwards ahead, then one forward and one backward alternately, then the backwards that are left.",
    "Rank r runs p − r − 1 forwards ahead, and never more than there are microbatches. Backwards run in the order of the forwards.",
    "ahead = min(p − rank − 1, n); F 0 … F ahead−1; then for i from ahead to n−1: F i, B i−ahead; then the last ``ahead`` backwards.",
)
INTERLEAVED = (
    "Write down all forwards of a rank in their order first, then all backwards in theirs; then merge the two lists as in 5.1.",
    "Forwards: for each group of p microbatches, for each chunk, each of the p. Backwards: the same with the chunks from m−1 down.",
    "Rank r runs 2(p − r − 1) + (m − 1)p forwards ahead (at most all n·m); then alternately; then the backwards that are left.",
    'passes = [(c, first + i) for first in range(0, n, p) for c in range(m) for i in range(p)]; forwards ("F", c, i), backwards '
    '("B", m − 1 − c, i).',
)
FREE_OUTPUT = (
    "A tensor is a view of a storage, which holds the memory. What does backward need of the output itself?",
    "Only its shape, to compare with the gradient's. So keep the tensor and free the storage.",
    "output.untyped_storage() can be resized to 0 bytes.",
)
HOW_MANY_FIT = (
    "First reserve, for every microbatch in flight, what it keeps if it is recomputed. What is left?",
    "Each microbatch that keeps everything needs full_bytes − recomputed_bytes more.",
    "left = budget_bytes − in_flight · recomputed_bytes; less than 0: −1; else min(in_flight, left // (full_bytes − recomputed_bytes)), "
    "and in_flight where the two sizes are equal, which // would divide by.",
)
MICROBATCHES_TO_KEEP = (
    "Walk through the rank's order from 5.1 and track which places are taken.",
    "A forward takes a place if one is free; the backward of a microbatch that has one gives it back.",
    'for kind, i in one_forward_one_backward(p, rank, n): on "B" taken.discard(i); on "F", if len(taken) < places, take one and '
    "note i.",
)
