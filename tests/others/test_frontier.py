"""The frontier is that of all sets of terms, found by trying them all."""

from itertools import chain, combinations

from actmem.config import Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import forward_products
from actmem.models import TINY, model_shape
from actmem.recipes import PAPER_LAYER
from actmem.rows import LAYER_TERMS, total
from actmem_course.others.frontier import all_choices, frontier


def every_set():
    together = set(PAPER_LAYER.one_tensor)
    alone = [recipe.term for recipe in PAPER_LAYER.recipes if recipe.term not in together]
    for terms in chain.from_iterable(combinations(alone, n) for n in range(len(alone) + 1)):
        yield set(terms)
        yield set(terms) | together


def test_no_set_of_terms_beats_it():
    shape = TINY.with_sizes(num_layers=1)
    sizes = {row.term: row.bytes for row in layer_rows(shape)}
    price = {product.term: product.flops for product in forward_products(shape, shape.micro_batch_size)}
    fewest: dict[int, int] = {}
    for dropped in every_set():
        kept = sum(size for term, size in sizes.items() if term not in dropped)
        flops = sum(price[product] for product in PAPER_LAYER.products_again(dropped))
        fewest[flops] = min(kept, fewest.get(flops, kept))
    best, wanted = sum(sizes.values()) + 1, []
    for flops, kept in sorted(fewest.items()):
        if kept < best:
            best = kept
            wanted.append((kept, flops))
    assert [(point.bytes, point.flops) for point in frontier(TINY)] == wanted


def test_the_modes_lie_where_they_should():
    shape = model_shape("175B")
    for parallel in (Parallel(), Parallel(8), Parallel(8, True)):
        points = {point.products: point for point in frontier(shape, parallel)}
        named = PAPER_LAYER.dropped("elementwise")
        assert points[("QKᵀ",)].dropped == named
        assert points[("QKᵀ",)].bytes == total(layer_rows(shape, parallel, "elementwise"))
        last = list(points.values())[-1]
        assert last.dropped == set(LAYER_TERMS[1:]) and last.bytes == total(layer_rows(shape, parallel, "full"))
    assert len(all_choices(shape)) == 2**5
