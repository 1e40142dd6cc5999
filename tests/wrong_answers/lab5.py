"""Wrong answers to lab 5: orders, freed outputs, microbatches that are kept."""

import torch

from actmem_course.judge.solutions import lab5_pipeline as right
from tests.wrong_answers.planted import planted

LAB = "lab5_pipeline"


def in_turn(forwards, backwards, ahead):
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards):
        order += pair
    return order + backwards[len(forwards) - ahead :]


def passes(n):
    return [("F", i) for i in range(n)], [("B", i) for i in range(n)]


@planted(LAB, "5.1", r"runs all forwards first and holds 4 microbatches|runs all forwards first and holds", size=1)
def all_forwards_first(pipeline_parallel_size, rank, num_microbatches):
    forwards, backwards = passes(num_microbatches)
    return forwards + backwards


@planted(LAB, "5.1", r"one forward too many ahead", size=1)
def one_too_many_ahead(pipeline_parallel_size, rank, num_microbatches):
    return in_turn(*passes(num_microbatches), ahead=pipeline_parallel_size - rank)


@planted(LAB, "5.1", r"runs 1 forward before its first backward, not 2", size=1)
def none_ahead(pipeline_parallel_size, rank, num_microbatches):
    return in_turn(*passes(num_microbatches), ahead=0)


@planted(LAB, "5.1", r"every rank runs equally many forwards ahead", size=1)
def equally_many_ahead(pipeline_parallel_size, rank, num_microbatches):
    return in_turn(*passes(num_microbatches), ahead=pipeline_parallel_size - 1)


@planted(LAB, "5.1", r"backwards run in the order of the forwards", size=1)
def last_in_first_out(pipeline_parallel_size, rank, num_microbatches):
    if pipeline_parallel_size == 1 or rank < pipeline_parallel_size - 1:
        return right.one_forward_one_backward(pipeline_parallel_size, rank, num_microbatches)
    forwards, backwards = passes(num_microbatches)
    return forwards + backwards[::-1]


@planted(LAB, "5.1", r"the last backwards run in reverse: rank 0 starts them with B7, not with B5", size=1)
def drains_in_reverse(pipeline_parallel_size, rank, num_microbatches):
    order = right.one_forward_one_backward(pipeline_parallel_size, rank, num_microbatches)
    left = len(order) - min(pipeline_parallel_size - rank - 1, num_microbatches)
    return order[:left] + order[left:][::-1]


@planted(LAB, "5.1", r"^1 rank, 3 microbatches: ", size=1)
def one_missing(pipeline_parallel_size, rank, num_microbatches):
    return right.one_forward_one_backward(pipeline_parallel_size, rank, num_microbatches)[:-1]


@planted(LAB, "5.1", r"never runs B", size=1)
def forgets_the_last_backwards(pipeline_parallel_size, rank, num_microbatches):
    order = right.one_forward_one_backward(pipeline_parallel_size, rank, num_microbatches)
    return order[: len(order) - min(pipeline_parallel_size - rank - 1, num_microbatches)]


@planted(LAB, "5.1", r"there is no such pass|before its forward|twice|never runs", size=1)
def more_ahead_than_there_are(pipeline_parallel_size, rank, num_microbatches):
    ahead = pipeline_parallel_size - rank - 1
    order = [("F", i) for i in range(ahead)]
    for i in range(ahead, num_microbatches):
        order += [("F", i), ("B", i - ahead)]
    return order + [("B", i) for i in range(max(0, num_microbatches - ahead), num_microbatches)]


@planted(LAB, "5.1", r"before its forward", size=1)
def backward_first(pipeline_parallel_size, rank, num_microbatches):
    forwards, backwards = passes(num_microbatches)
    return [action for pair in zip(backwards, forwards) for action in pair]


@planted(LAB, "5.1", r'each entry must be \("F", i\) or \("B", i\)', size=1)
def words(pipeline_parallel_size, rank, num_microbatches):
    return [("forward", i) for i in range(num_microbatches)]


@planted(LAB, "5.1", r"got generator: put list\(…\) around it", size=1)
def one_at_a_time(pipeline_parallel_size, rank, num_microbatches):
    yield from right.one_forward_one_backward(pipeline_parallel_size, rank, num_microbatches)


def chunked(n, m, p, back=True):
    order = [(chunk, first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p)]
    return [("F", c, i) for c, i in order], [("B", m - 1 - c if back else c, i) for c, i in order]


@planted(LAB, "5.2", r"backwards begin with chunk 1, not with chunk 0", size=1)
def backwards_from_the_first_chunk(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    return in_turn(*chunked(n, m, p, back=False), ahead=2 * (p - rank - 1) + (m - 1) * p)


@planted(LAB, "5.2", r"forwards before its first backward, not|deadlock", size=1)
def equally_many_ahead_on_every_rank(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    return in_turn(*chunked(n, m, p), ahead=(m - 1) * p)


@planted(
    LAB,
    "5.2",
    r"all microbatches through chunk 0 before any goes through chunk 1: 2 microbatches go through chunk 0 first",
    size=1,
)
def a_chunk_at_a_time(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    m, n = num_model_chunks, num_microbatches
    return [("F", c, i) for c in range(m) for i in range(n)] + [
        ("B", c, i) for c in reversed(range(m)) for i in range(n)
    ]


def ahead_in_turn(forwards, backwards, p, rank, m):
    return in_turn(forwards, backwards, ahead=2 * (p - rank - 1) + (m - 1) * p)


@planted(
    LAB,
    "5.2",
    r"the forwards take each microbatch through all chunks before the next one: 2 microbatches go through chunk 0 first",
    size=1,
)
def a_microbatch_at_a_time(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    order = [(c, i) for i in range(n) for c in range(m)]
    return ahead_in_turn([("F", c, i) for c, i in order], [("B", m - 1 - c, i) for c, i in order], p, rank, m)


@planted(
    LAB,
    "5.2",
    r"the backwards take each microbatch through all chunks before the next one: 2 microbatches go through chunk 1 first",
    size=1,
)
def backwards_a_microbatch_at_a_time(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    return ahead_in_turn(chunked(n, m, p)[0], [("B", c, i) for i in range(n) for c in reversed(range(m))], p, rank, m)


@planted(LAB, "5.2", r"the last backwards run in reverse", size=1)
def drains_chunks_in_reverse(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    order = right.interleaved(pipeline_parallel_size, rank, num_model_chunks, num_microbatches)
    last = max(i for i, action in enumerate(order) if action[0] == "F")
    return order[: last + 2] + order[last + 2 :][::-1]


@planted(LAB, "5.2", r"the chunk comes before the microbatch", size=1)
def microbatch_before_chunk(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    return [
        (kind, i, c)
        for kind, c, i in right.interleaved(pipeline_parallel_size, rank, num_model_chunks, num_microbatches)
    ]


@planted(LAB, "5.2", r"rank 0 never runs B3 of chunk 0", size=1)
def forgets_a_backward(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    return right.interleaved(pipeline_parallel_size, rank, num_model_chunks, num_microbatches)[:-1]


@planted(LAB, "5.3", r"are still there", size=1)
def deletes_the_name(output):
    del output


@planted(LAB, "5.3", r"has shape \[1\] now", size=1)
def replaces_the_data(output):
    output.data = torch.empty(1, dtype=output.dtype)


@planted(LAB, "5.3", r"lost its graph", size=1)
def detaches(output):
    output.detach_()
    output.untyped_storage().resize_(0)


@planted(LAB, "5.3", r"are still there", size=1)
def fills_with_zeros(output):
    output.data.zero_()


@planted(LAB, "5.3", r"has dtype float32 now, not float64", size=1)
def one_element_of_another_dtype(output):
    output.data = torch.zeros(1).expand(output.shape)


@planted(LAB, "5.3", r"has dtype float16 now, not float64", size=1)
def half_as_many_bytes(output):
    output.data = output.data.half()


@planted(LAB, "5.4", r"leaves no room for what the recomputed ones keep", size=1)
def whole_budget_for_the_full_ones(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    return min(in_flight, budget_bytes // full_bytes)


@planted(LAB, "5.4", r"not full_bytes$", size=1)
def divides_by_full_bytes(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    left = budget_bytes - in_flight * recomputed_bytes
    return min(in_flight, left // full_bytes) if left >= 0 else -1


@planted(LAB, "5.4", r"more than are in flight", size=1)
def more_than_in_flight(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    left = budget_bytes - in_flight * recomputed_bytes
    return left // (full_bytes - recomputed_bytes) if left >= 0 else -1


@planted(LAB, "5.4", r"the result must be -1", size=1)
def zero_where_nothing_fits(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    return max(0, right.how_many_fit(budget_bytes, in_flight, full_bytes, recomputed_bytes))


@planted(LAB, "5.4", r"take exactly the budget, and that does not exceed it", size=1)
def less_than_the_budget(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    fits = [k for k in range(in_flight + 1) if k * full_bytes + (in_flight - k) * recomputed_bytes < budget_bytes]
    return max(fits, default=-1)


@planted(LAB, "5.4", r"take exactly the budget, and that does not exceed it", size=1)
def less_than_the_budget_and_never_below_0(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    left = budget_bytes - in_flight * recomputed_bytes
    return max(0, min(in_flight, (left - 1) // (full_bytes - recomputed_bytes))) if left >= 0 else -1


@planted(LAB, "5.4", r"recomputing all takes exactly the budget, so the result must be 0, not -1", size=1)
def nothing_left_taken_for_too_little(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    left = budget_bytes - in_flight * recomputed_bytes
    return -1 if left <= 0 else right.how_many_fit(budget_bytes, in_flight, full_bytes, recomputed_bytes)


@planted(LAB, "5.4", r"must be a whole number, not True", size=1)
def whether_some_fit(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    return right.how_many_fit(budget_bytes, in_flight, full_bytes, recomputed_bytes) >= 0


@planted(LAB, "5.4", r"divide with //", size=1)
def divides_with_a_fraction(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    return (budget_bytes - in_flight * recomputed_bytes) / (full_bytes - recomputed_bytes)


@planted(LAB, "5.5", r"never give up their places", size=1)
def only_the_first(pipeline_parallel_size, rank, num_microbatches, places):
    return list(range(min(places, num_microbatches)))


@planted(LAB, "5.5", r"at once; a place becomes free only after the backward", size=1)
def all_of_them(pipeline_parallel_size, rank, num_microbatches, places):
    return list(range(num_microbatches))


@planted(LAB, "5.5", r"take a place whenever one is free", size=1)
def period_of_p_on_every_rank(pipeline_parallel_size, rank, num_microbatches, places):
    return [i for i in range(num_microbatches) if i % pipeline_parallel_size < places]


@planted(LAB, "5.5", r"there are no places, so no microbatch can keep everything, but this returns \[0, 3, 6\]", size=1)
def at_least_one_place(pipeline_parallel_size, rank, num_microbatches, places):
    return right.microbatches_to_keep(pipeline_parallel_size, rank, num_microbatches, max(places, 1))


@planted(LAB, "5.5", r"got a generator: put list\(…\) around it", size=1)
def kept_one_at_a_time(pipeline_parallel_size, rank, num_microbatches, places):
    yield from right.microbatches_to_keep(pipeline_parallel_size, rank, num_microbatches, places)


@planted(LAB, "5.5", r"a list of different microbatches .* got \[True, True, False", size=1)
def whether_each_is_kept(pipeline_parallel_size, rank, num_microbatches, places):
    kept = right.microbatches_to_keep(pipeline_parallel_size, rank, num_microbatches, places)
    return [i in kept for i in range(num_microbatches)]
