"""Right answers to lab 1: the same numbers put together in another way."""

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.rows import total
from tests.right_answers.register import right


@right("1.1")
def layer_bytes_by_the_rows_of_the_package(seq_length, micro_batch_size, hidden_size, num_attention_heads):
    shape = ModelShape(seq_length, micro_batch_size, hidden_size, num_attention_heads)
    return {row.term: row.bytes for row in layer_rows(shape)}


@right("1.2")
def rank_bytes_by_the_rows_of_the_package(s, b, h, a, t, sequence_parallel, recompute):
    return total(layer_rows(ModelShape(s, b, h, a), Parallel(t, sequence_parallel), recompute=recompute))


@right("1.3")
def gated_mlp_bytes_in_one_term(s, b, h, f):
    return 2 * s * b * (h + 4 * f)


@right("1.4")
def crossover_by_trying(hidden_size, num_attention_heads):
    s = 1
    while 5 * num_attention_heads * s <= 34 * hidden_size:
        s += 1
    return s
