"""When does a larger microbatch pay for recomputation?  Freed bytes become sequences.

The model is small on purpose: a step costs a fixed part, whatever the microbatch (launches,
the optimizer's step, exchanges of gradients, products too small to fill the device), and a part
for every sequence.  Recomputation raises the second part; more sequences share the first.
Bytes are those of L layers on one device at their fullest, which is when backward has one
layer's tensors back.
"""

from __future__ import annotations

from fractions import Fraction

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.rows import total


def fullest_bytes(shape: ModelShape, recompute: str) -> int:
    """What the layers keep when backward begins, with one of them made whole again."""
    whole, left = total(layer_rows(shape)), total(layer_rows(shape, recompute=recompute))
    return shape.num_layers * left + (whole - left)


def batch_factor(shape: ModelShape, recompute: str) -> Fraction:
    """Sequences that fit where one fitted without recomputation."""
    return Fraction(fullest_bytes(shape, "none"), fullest_bytes(shape, recompute))


def throughput(shape: ModelShape, recompute: str, fixed_share: Fraction) -> Fraction:
    """Sequences a second, over those without recomputation in the same memory.

    fixed_share φ: fixed part of a step over the work of the sequences that fit without
    recomputation.  (1 + φ) / (1 + overhead + φ/factor).
    """
    return (1 + fixed_share) / (1 + layer_overhead(shape, recompute) + fixed_share / batch_factor(shape, recompute))


def break_even(shape: ModelShape, recompute: str) -> Fraction:
    """The φ above which the mode is the faster one: overhead / (1 − 1/factor).

    Raises ConfigError for a single layer, where backward has every byte back and nothing is freed.
    """
    if batch_factor(shape, recompute) == 1:
        raise ConfigError("num_layers", f"recompute = {recompute!r} frees nothing with {shape.num_layers} layer(s)")
    return layer_overhead(shape, recompute) / (1 - 1 / batch_factor(shape, recompute))
