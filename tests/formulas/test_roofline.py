"""FLOPs of the operations are appendix A's; bytes are what eager operations read and write."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from actmem.config import Parallel
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.formulas.flops import Operation, forward_operations, forward_products, least_seconds
from actmem.models import TINY
from tests.shapes import shapes


@given(shapes())
def test_products_are_those_of_appendix_a(shape):
    expected = {p.term: p.flops for p in forward_products(shape, shape.micro_batch_size) if p.term != "logits"}
    assert {o.name: o.flops for o in forward_operations(shape) if o.product} == expected


@given(st.sampled_from([2, 3, 4]), st.data())
def test_t_ranks_share_the_products_flops_equally(t, data):
    shape = data.draw(shapes(divisible_by=t))
    one, shared = forward_operations(shape), forward_operations(shape, Parallel(t, True))
    assert [o.flops for o in one if o.product] == [t * o.flops for o in shared if o.product]
    # The core is cut whole: every head is on one rank, with all that it moves.
    assert [o.bytes for o in one if o.core] == [t * o.bytes for o in shared if o.core]


@given(shapes())
def test_what_is_kept_was_written(shape):
    """Of the core: scores' softmax and dropout output are written with two bytes each, the mask with one."""
    kept = sum(row.bytes for row in layer_rows(shape) if row.term in CORE_ATTENTION_TERMS)
    by_name = {o.name: o for o in forward_operations(shape)}
    a, b, _, s = shape.letters()
    scores = a * s * s * b
    read = 2 * scores * 2  # softmax and dropout each read one tensor of scores
    assert by_name["softmax"].bytes + by_name["softmax dropout"].bytes - read == kept


def test_linears_by_hand():
    by_name = {o.name: o for o in forward_operations(TINY)}
    h, tokens = TINY.hidden_size, TINY.seq_length * TINY.micro_batch_size
    assert by_name["h→4h"].bytes == 2 * (tokens * h + 4 * h * h + tokens * 4 * h)
    assert by_name["4h→h"].bytes == by_name["h→4h"].bytes
    assert by_name["GeLU"].bytes == 2 * 2 * tokens * 4 * h


def test_the_longer_of_computing_and_moving():
    slow, fast = Operation("slow", 10, 100, False), Operation("fast", 1000, 100, True)
    assert slow.least_seconds(100, 50) == 2 and slow.bound_by_memory(100, 50)
    assert fast.least_seconds(100, 50) == 10 and not fast.bound_by_memory(100, 50)
    assert least_seconds([slow, fast], 100, 50) == 12
    assert slow.intensity == Fraction(1, 10)
