"""Freed bytes become sequences: what a larger microbatch gains where recomputation freed bytes.

A simple model: a step has a fixed cost, whatever the microbatch (kernel launches, the optimizer's step, gradient
exchanges, products too small to fill the device), and a cost per sequence.  Recomputation raises the cost per sequence;
more sequences share the fixed cost.  Bytes are the peak of L layers on one device, reached when backward has recomputed
one layer's tensors.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.recipes import Recompute
from actmem.rows import total

_overhead = cache(layer_overhead)


def fullest_bytes(shape: ModelShape, recompute: Recompute | str) -> int:
    """Peak bytes of the layers: what they keep when backward begins, with one layer recomputed."""
    whole, left = total(layer_rows(shape)), total(layer_rows(shape, recompute=recompute))
    return shape.num_layers * left + (whole - left)


@cache
def batch_factor(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """How many sequences fit in the memory of one without recomputation."""
    return Fraction(fullest_bytes(shape, "none"), fullest_bytes(shape, recompute))


def throughput(shape: ModelShape, recompute: Recompute | str, fixed_share: Fraction) -> Fraction:
    """Sequences per second, relative to no recomputation in the same memory.

    fixed_share φ: the fixed cost of a step, relative to the cost of the sequences that fit
    without recomputation.  (1 + φ) / (1 + overhead + φ/factor).
    """
    return (1 + fixed_share) / (1 + _overhead(shape, recompute) + fixed_share / batch_factor(shape, recompute))


def break_even(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """The φ above which the mode is faster: overhead / (1 − 1/factor).

    Raises ConfigError for a single layer: backward recomputes all of it, so nothing is freed.
    """
    if batch_factor(shape, recompute) == 1:
        raise ConfigError(
            "num_layers", f"recompute = {Recompute.of(recompute).name!r} frees nothing with {shape.num_layers} layer(s)"
        )
    return layer_overhead(shape, recompute) / (1 - 1 / batch_factor(shape, recompute))
