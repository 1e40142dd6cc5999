"""One step tensor by tensor, what a FLOP of recomputation frees, and what a larger microbatch then brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.formulas.flops import layer_matmuls
from actmem.recipes import Recompute
from actmem.rows import Row, total


@dataclass(frozen=True)
class Moment:
    """What is held after one change.

    Attributes:
        says: The change, in words.
        layer: The layer that changed.
        held: For each layer the rows that are there.
        again: They were just recomputed.
    """

    says: str
    layer: int
    held: tuple[tuple[Row, ...], ...]
    again: bool = False

    @property
    def bytes(self) -> int:
        """Of all layers together."""
        return sum(total(rows) for rows in self.held)


@cache
def training_moments(shape: ModelShape, recompute: str = "none") -> tuple[Moment, ...]:
    """Forward and backward through the shape's layers, one stored tensor at a time, from nothing to nothing.

    Backward takes a layer's tensors in reverse.  Where it needs one that forward dropped, all that the layer
    has dropped is recomputed first.
    """
    whole, kept = layer_rows(shape), {row.term for row in layer_rows(shape, recompute=recompute)}
    held: list[list[Row]] = [[] for _ in range(shape.num_layers)]
    found = [Moment("before the forward pass", 0, _frozen(held))]
    for layer, rows in enumerate(held):
        for row in whole:
            if row.term in kept:
                rows.append(row)
                found.append(Moment(f"forward, layer {layer}: {row.term} is saved", layer, _frozen(held)))
    for layer in reversed(range(shape.num_layers)):
        there = {row.term for row in held[layer]}
        for row in reversed(whole):
            if row.term not in there:
                held[layer] = list(whole[: whole.index(row) + 1])
                there = {one.term for one in held[layer]}
                says = f"backward, layer {layer}: what wasn't saved is recomputed"
                found.append(Moment(says, layer, _frozen(held), again=True))
            held[layer].pop()
            found.append(Moment(f"backward, layer {layer}: {row.term} is freed", layer, _frozen(held)))
    return tuple(found)


def _frozen(held: Sequence[Sequence[Row]]) -> tuple[tuple[Row, ...], ...]:
    return tuple(map(tuple, held))


@dataclass(frozen=True)
class Rebuild:
    """Tensors that are recomputed together.  how: from what, by what.  flops: of its matmuls."""

    name: str
    terms: tuple[str, ...]
    how: str
    bytes: int
    flops: int


#: Tensors that are recomputed together, how, and the matmuls that this takes.
_GROUPS = (
    ("layer-norm outputs", ("QKV projection input", "h→4h input"), "layer norm of its input", ""),
    ("Q, K, V", ("Q", "K", "V"), "QKV projection", "QKV projection"),
    ("core attention", CORE_ATTENTION_TERMS, "QKᵀ, softmax, dropout", "QKᵀ"),
    ("attention projection input", ("attention projection input",), "attention over V", "attention over V"),
    ("layer-norm 2 input", ("layer-norm 2 input",), "attention projection, dropout, sum", "attention projection"),
    ("GeLU input", ("GeLU input",), "h→4h", "h→4h"),
    ("GeLU output", ("4h→h input",), "GeLU of its input", ""),
    ("block dropout masks", ("attention dropout mask", "MLP dropout mask"), "draw again", ""),
)


def rebuilds(shape: ModelShape) -> list[Rebuild]:
    """All tensors of a layer except its input, from which the rest is computed; 16 bits, one rank.

    In the order of the forward pass.  Bytes add up to equation 1 without the input's 2sbh,
    FLOPs to the forward pass without the last matmul, 4h→h, whose output nothing keeps.
    """
    matmuls = {"": 0, **layer_matmuls(shape)}
    sizes = {row.term: row.bytes for row in layer_rows(shape)}
    return [
        Rebuild(name, terms, how, sum(sizes[term] for term in terms), matmuls[matmul])
        for name, terms, how, matmul in _GROUPS
    ]


def fullest_bytes(shape: ModelShape, recompute: Recompute | str) -> int:
    """Peak bytes of the layers: what they keep when backward begins, with one layer recomputed."""
    whole, left = total(layer_rows(shape)), total(layer_rows(shape, recompute=recompute))
    return shape.num_layers * left + (whole - left)


@cache
def batch_factor(shape: ModelShape, recompute: Recompute | str) -> Fraction:
    """How many sequences fit in the memory of one without recomputation."""
    return Fraction(fullest_bytes(shape, "none"), fullest_bytes(shape, recompute))
