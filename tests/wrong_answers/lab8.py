"""Wrong answers to lab 8: states that ZeRO leaves whole, microbatches in flight, plans that don't fit or are slow."""

from actmem_course.judge.solutions.lab8_plan import largest_micro_batch_size, plan_of, rank_state_bytes
from tests.wrong_answers.planted import planted

LAB = "lab8_plan"


@planted(
    LAB,
    "8.1",
    r"stage 1: weights .*: stage 1 leaves them whole on every rank; .* from stage 3 on",
    size=1,
)
def everything_divided_by_stage_1(num_parameters, data_parallel_size, zero_stage):
    return rank_state_bytes(num_parameters, data_parallel_size, 3 if zero_stage else 0)


@planted(
    LAB, "8.1", r"stage 1: optimizer states .*: from stage 1 on they are divided among the data-parallel ranks", size=1
)
def stages_one_too_late(num_parameters, data_parallel_size, zero_stage):
    return rank_state_bytes(num_parameters, data_parallel_size, max(0, zero_stage - 1))


@planted(LAB, "8.1", r"optimizer states .*round the share up", size=1)
def share_rounded_down(num_parameters, data_parallel_size, zero_stage):
    share = num_parameters // data_parallel_size
    held = [share if zero_stage >= stage else num_parameters for stage in (3, 2, 1)]
    return {"weights": 2 * held[0], "gradients": 4 * held[1], "optimizer states": 12 * held[2]}


@planted(LAB, "8.1", r"gradients are added up in float32, 4 bytes each", size=1)
def gradients_of_16_bits(*sizes):
    return {name: size // (2 if name == "gradients" else 1) for name, size in rank_state_bytes(*sizes).items()}


@planted(LAB, "8.1", r"Adam keeps a float32 copy of the weights besides its two averages", size=1)
def without_the_float32_copy(*sizes):
    return {name: size * (2 if "states" in name else 3) // 3 for name, size in rank_state_bytes(*sizes).items()}


@planted(LAB, "8.1", r"weights have 16 bits; the float32 copy belongs to the optimizer", size=1)
def weights_of_32_bits(*sizes):
    return {name: size * (2 if name == "weights" else 1) for name, size in rank_state_bytes(*sizes).items()}


@planted(LAB, "8.1", r"expected exactly the names weights, gradients, optimizer states, got weights", size=1)
def names_forgotten(num_parameters, data_parallel_size, zero_stage):
    return {"weights": 2 * num_parameters}


def largest(fits):
    """An answer by another condition: fits(memory, fixed, each, p, sequences, b)."""
    return lambda m, x, e, p, n: max((b for b in range(1, n + 1) if n % b == 0 and fits(m, x, e, p, n, b)), default=0)


@planted(LAB, "8.2", r"the stage holds min\(p, n\) microbatches at once, not one", size=1)
def one_in_flight(memory_bytes, fixed_bytes, bytes_per_sequence, p, sequences):
    return largest(lambda m, x, e, p, n, b: x + b * e <= m)(memory_bytes, fixed_bytes, bytes_per_sequence, p, sequences)


@planted(LAB, "8.2", r"there are only \d+ of them, so fewer than p are in flight", size=1)
def always_p_in_flight(memory_bytes, fixed_bytes, bytes_per_sequence, p, sequences):
    return largest(lambda m, x, e, p, n, b: x + p * b * e <= m)(
        memory_bytes, fixed_bytes, bytes_per_sequence, p, sequences
    )


@planted(LAB, "8.2", r"takes exactly the memory, and that fits: compare with <=", size=1)
def memory_must_stay_free(memory_bytes, *sizes):
    return largest_micro_batch_size(memory_bytes - 1, *sizes)


@planted(LAB, "8.2", r"fixed_bytes takes memory too|not even a microbatch of one sequence fits", size=1)
def fixed_bytes_forgotten(memory_bytes, fixed_bytes, *sizes):
    return largest_micro_batch_size(memory_bytes, 0, *sizes)


@planted(LAB, "8.2", r"can't be split into whole microbatches of", size=1)
def any_size(memory_bytes, fixed_bytes, bytes_per_sequence, p, sequences):
    fitting = (memory_bytes - fixed_bytes) // bytes_per_sequence
    return max((b for b in range(1, sequences + 1) if min(p * b, sequences) <= fitting), default=0)


@planted(LAB, "8.2", r"so the result must be 0, not 1", size=1)
def at_least_one(*sizes):
    return max(1, largest_micro_batch_size(*sizes))


def changed(job, **values):
    """Our plans, with other values in one of them."""
    return lambda wanted: {**plan_of(wanted), **(values if wanted == job else {})}


@planted(
    LAB,
    "8.3",
    r"^8B: it doesn't fit: rank 0's bill passes 36\.0 GiB at the line “.*” and ends \d+\.\d GiB above it\. Its largest lines: .* GiB",
    size=1,
)
def nothing_divided(job):
    return changed("8B", tensor_parallel_size=1, zero_stage=0)(job)


@planted(LAB, "8.3", r"^175B: it doesn't fit: .* at the line “activations: ", size=1)
def nothing_recomputed(job):
    return changed("175B", recompute="none")(job)


@planted(
    LAB,
    "8.3",
    r"^22B: it fits, with \d+\.\d GiB to spare, but a step takes .* longer than by the fastest plan; .* Most of it is in “recompute”",
    size=1,
)
def recomputed_without_need(job):
    return changed("22B", recompute="full")(job)


@planted(LAB, "8.3", r"^22B: tensor_parallel_size must divide the 8 GPUs of a node, got 16", size=1)
def across_nodes(job):
    return changed("22B", tensor_parallel_size=16)(job)


@planted(LAB, "8.3", r"^22B: 4 data-parallel ranks with microbatches of 3 must divide the 64 sequences", size=1)
def a_microbatch_that_does_not_divide(job):
    return changed("22B", micro_batch_size=3)(job)


@planted(LAB, "8.3", r"^8B: recompute must be one of none, elementwise, full, not 'selective'", size=1)
def no_scores_to_drop(job):
    return changed("8B", recompute="selective")(job)


@planted(LAB, "8.3", r"^8B: the plan has no 'zero_stage'", size=1)
def a_size_forgotten(job):
    return {name: value for name, value in plan_of(job).items() if name != "zero_stage"}


@planted(LAB, "8.3", r"^175B: t · p = 8 · 5 must divide the 64 GPUs", size=1)
def a_pipeline_that_does_not_divide(job):
    return changed("175B", pipeline_parallel_size=5)(job)


@planted(LAB, "8.3", r"^175B: num_layers: 96 can't be spread over pipeline_parallel_size = 64$", size=1)
def a_stage_without_layers(job):
    return changed("175B", tensor_parallel_size=1, pipeline_parallel_size=64, micro_batch_size=1)(job)


@planted(LAB, "8.3", r"^22B: a microbatch of more than 32 sequences only holds more", size=1)
def all_sequences_at_once(job):
    return changed("22B", tensor_parallel_size=8, pipeline_parallel_size=2, micro_batch_size=64)(job)
