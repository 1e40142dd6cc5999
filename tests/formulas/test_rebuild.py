"""Bytes and FLOPs of making tensors again, against equation 1 and the layer's own products."""

from fractions import Fraction

from hypothesis import given

from actmem.formulas.activations import eq1
from actmem.formulas.flops import forward_products
from actmem.formulas.rebuild import core_over_gelu, rebuilds
from actmem.models import TINY
from actmem.rows import LAYER_TERMS
from tests.shapes import shapes


@given(shapes())
def test_bytes_add_up_to_equation_1_without_the_input(shape):
    _, b, h, s = shape.letters()
    assert sum(r.bytes for r in rebuilds(shape)) == eq1(shape) - 2 * s * b * h


@given(shapes())
def test_flops_are_the_forward_products_that_something_kept_needs(shape):
    products = {p.term: p.flops for p in forward_products(shape, shape.micro_batch_size)}
    assert sum(r.flops for r in rebuilds(shape)) == sum(products.values()) - products["logits"] - products["4h→h"]


def test_every_term_but_the_input_comes_once():
    terms = [term for r in rebuilds(TINY) for term in r.terms]
    assert sorted(terms) == sorted(LAYER_TERMS[1:])


@given(shapes())
def test_the_core_gives_back_5a_over_2_times_the_bytes(shape):
    by_name = {r.name: r for r in rebuilds(shape)}
    core, gelu = by_name["attention core"], by_name["GeLU input"]
    assert core.bytes_per_flop / gelu.bytes_per_flop == core_over_gelu(shape)
    assert gelu.bytes_per_flop == Fraction(1, shape.hidden_size)
    assert by_name["GeLU output"].bytes_per_flop is None
