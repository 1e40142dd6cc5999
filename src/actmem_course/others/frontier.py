"""The frontier of recomputation: the fewest bytes for each number of FLOPs added, over all sets of terms.

What needs no matrix product is free, so only products have a price: a choice is a set of products
that run again, and with it go all terms that these can rebuild.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import forward_products
from actmem.recipes import PAPER_LAYER


@dataclass(frozen=True)
class FrontierPoint:
    """One choice.  products: run again in backward.  dropped: the terms that go.  bytes: kept; flops: added."""

    products: tuple[str, ...]
    dropped: frozenset[str]
    bytes: int
    flops: int


def all_choices(shape: ModelShape, parallel: Parallel = Parallel()) -> list[FrontierPoint]:
    """Every set of products of the paper's layer that can be run again: bytes of one layer on one rank, FLOPs of all ranks."""
    one_layer = shape.with_sizes(num_layers=1)
    price = {product.term: product.flops for product in forward_products(one_layer, shape.micro_batch_size)}
    sizes = {row.term: row.bytes for row in layer_rows(shape, parallel, "none")}
    # A dict, because a set of texts has another order in each run.
    priced = list(dict.fromkeys(product for recipe in PAPER_LAYER.recipes for product in recipe.products))
    choices = []
    for count in range(len(priced) + 1):
        for products in combinations(priced, count):
            dropped = frozenset(r.term for r in PAPER_LAYER.recipes if set(r.products) <= set(products))
            kept = sum(size for term, size in sizes.items() if term not in dropped)
            choices.append(FrontierPoint(products, dropped, kept, sum(price[product] for product in products)))
    return choices


def frontier(shape: ModelShape, parallel: Parallel = Parallel()) -> list[FrontierPoint]:
    """The choices that no other beats in bytes and FLOPs at once, from the fewest FLOPs to the fewest bytes."""
    best: list[FrontierPoint] = []
    for choice in sorted(all_choices(shape, parallel), key=lambda c: (c.flops, c.bytes)):
        if not best or choice.bytes < best[-1].bytes:
            best.append(choice)
    return best
