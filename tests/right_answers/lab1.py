"""Right answers to lab 1: the same numbers put together in another way."""

from tests.right_answers.register import right


@right("1.3")
def gated_mlp_bytes_in_one_term(s, b, h, f):
    return 2 * s * b * (h + 4 * f)


@right("1.4")
def crossover_by_trying(hidden_size, num_attention_heads):
    s = 1
    while 5 * num_attention_heads * s <= 34 * hidden_size:
        s += 1
    return s
