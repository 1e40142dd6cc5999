"""Wrong answers to lab 1: bytes."""

from actmem_course.judge.solutions.lab1_count_bytes import layer_bytes, rank_bytes
from tests.wrong_answers.planted import planted

LAB = "lab1_count_bytes"


def with_terms(changes):
    """Our dict with some terms replaced: changes(s, b, h, a) gives them."""
    return lambda s, b, h, a: {**layer_bytes(s, b, h, a), **changes(s, b, h, a)}


@planted(
    LAB,
    "1.1",
    r"^softmax output lacks the factor a; .*5 more terms|^softmax output lacks the factor a; softmax dropout mask lacks the factor a",
    size=1,
)
def terms_without_heads(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    return with_terms(lambda s, b, h, a: {"softmax output": 2 * s * s * b, "softmax dropout mask": s * s * b})(
        seq_length, micro_batch_size, hidden_size, num_attention_heads
    )


@planted(LAB, "1.1", r"attention dropout mask is 2 times what is kept \(a mask takes 1 byte", size=1)
def masks_of_2_bytes(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    return with_terms(lambda s, b, h, a: {"attention dropout mask": 2 * s * b * h})(
        seq_length, micro_batch_size, hidden_size, num_attention_heads
    )


@planted(LAB, "1.1", r"GeLU input is 1/4 of what is kept \(it is 4h wide\)", size=1)
def gelu_input_of_h(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    return with_terms(lambda s, b, h, a: {"GeLU input": 2 * s * b * h})(
        seq_length, micro_batch_size, hidden_size, num_attention_heads
    )


@planted(
    LAB, "1.1", r"^layer-norm 1 input is 1/2 of what is kept \(2 bytes an element\).*13 more|10 more terms", size=1
)
def elements_for_bytes(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    right = layer_bytes(seq_length, micro_batch_size, hidden_size, num_attention_heads)
    return {term: size if "mask" in term else size // 2 for term, size in right.items()}


@planted(LAB, "1.1", r"Q is divided by a, which it has nothing to do with", size=1)
def q_of_one_head(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    return with_terms(lambda s, b, h, a: {"Q": 2 * s * b * h // a})(
        seq_length, micro_batch_size, hidden_size, num_attention_heads
    )


@planted(LAB, "1.1", r"missing softmax dropout output", size=1)
def one_term_forgotten(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    right = layer_bytes(seq_length, micro_batch_size, hidden_size, num_attention_heads)
    return {term: size for term, size in right.items() if term != "softmax dropout output"}


@planted(LAB, "1.1", r"must be a whole number, not .*divide with //", size=1)
def fractions(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    right = layer_bytes(seq_length, micro_batch_size, hidden_size, num_attention_heads)
    return {term: size / 1 for term, size in right.items()}


def sizes(s, b, h, a, t, sequence_parallel, recompute):
    cut = t if sequence_parallel else 1
    return s * b * h, 5 * a * s * s * b * (recompute == "none"), cut


@planted(LAB, "1.2", r"5as²b is not divided by t", size=1)
def core_not_divided(
    seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, sequence_parallel, recompute
):
    # The mistake of a widely used memory widget, once sequence parallelism is ticked.
    sbh, core, cut = sizes(
        seq_length,
        micro_batch_size,
        hidden_size,
        num_attention_heads,
        tensor_parallel_size,
        sequence_parallel,
        recompute,
    )
    if recompute == "full":
        return 2 * sbh // cut
    return 10 * sbh // cut + 24 * sbh // tensor_parallel_size + core


@planted(LAB, "1.2", r"this is what selective recomputation keeps; full recomputation keeps", size=1)
def full_taken_for_selective(
    seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, sequence_parallel, recompute
):
    recompute = "selective" if recompute == "full" else recompute
    return rank_bytes(
        seq_length,
        micro_batch_size,
        hidden_size,
        num_attention_heads,
        tensor_parallel_size,
        sequence_parallel,
        recompute,
    )


@planted(LAB, "1.2", r"\(10sbh\) are divided by t; without sequence parallelism", size=1)
def everything_divided(
    seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, sequence_parallel, recompute
):
    return rank_bytes(
        seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, True, recompute
    )


@planted(LAB, "1.2", r"10sbh is not divided by t", size=1)
def sequence_parallelism_ignored(
    seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, sequence_parallel, recompute
):
    return rank_bytes(
        seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, False, recompute
    )


@planted(LAB, "1.2", r"multiplied by 2 again", size=1)
def bytes_times_the_element_size(
    seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, sequence_parallel, recompute
):
    return 2 * rank_bytes(
        seq_length,
        micro_batch_size,
        hidden_size,
        num_attention_heads,
        tensor_parallel_size,
        sequence_parallel,
        recompute,
    )


@planted(LAB, "1.2", r"Q, K and V are dropped as well", size=1)
def selective_drops_q_k_v(
    seq_length, micro_batch_size, hidden_size, num_attention_heads, tensor_parallel_size, sequence_parallel, recompute
):
    right = rank_bytes(
        seq_length,
        micro_batch_size,
        hidden_size,
        num_attention_heads,
        tensor_parallel_size,
        sequence_parallel,
        recompute,
    )
    q_k_v = 6 * seq_length * micro_batch_size * hidden_size // tensor_parallel_size
    return right - q_k_v if recompute == "selective" else right


@planted(LAB, "1.3", r"x is counted twice", size=1)
def x_twice(seq_length, micro_batch_size, hidden_size, feed_forward_size):
    return seq_length * micro_batch_size * (4 * hidden_size + 8 * feed_forward_size)


@planted(LAB, "1.3", r"one of four: the input of silu and its result", size=1)
def without_the_input_of_silu(seq_length, micro_batch_size, hidden_size, feed_forward_size):
    return seq_length * micro_batch_size * (2 * hidden_size + 6 * feed_forward_size)


@planted(LAB, "1.4", r"rounded down, and at that s the core attention", size=1)
def rounded_down(hidden_size, num_attention_heads):
    return 34 * hidden_size // (5 * num_attention_heads)


@planted(LAB, "1.4", r"h and a are swapped", size=1)
def exchanged(hidden_size, num_attention_heads):
    return 34 * num_attention_heads // (5 * hidden_size) + 1


@planted(LAB, "1.4", r"dropout mask is left out of the core", size=1)
def without_the_mask(hidden_size, num_attention_heads):
    return 34 * hidden_size // (4 * num_attention_heads) + 1


@planted(LAB, "1.4", r"whole number, not 87", size=1)
def not_whole(hidden_size, num_attention_heads):
    return 34 * hidden_size / (5 * num_attention_heads)


@planted(LAB, "1.1", r"^softmax dropout output is 2 times what is kept", size=1)
def softmax_dropout_output_twice(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    return with_terms(lambda s, b, h, a: {"softmax dropout output": 4 * a * s * s * b})(
        seq_length, micro_batch_size, hidden_size, num_attention_heads
    )


@planted(LAB, "1.2", r"with sequence parallelism, .*divides more than one input \(2sbh\): .*10sbh in all", size=1)
def sequence_parallelism_saves_one_input(s, b, h, a, t, sequence_parallel, recompute):
    without = rank_bytes(s, b, h, a, t, False, recompute)
    if not sequence_parallel or recompute == "full":
        return rank_bytes(s, b, h, a, t, sequence_parallel, recompute)
    return without - 2 * s * b * h + 2 * s * b * h // t
