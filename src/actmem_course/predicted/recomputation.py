"""Predict what a training step holds, tensor by tensor, and its peak with recomputation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.recipes import Recompute
from actmem.rows import Row, total


@dataclass(frozen=True)
class Moment:
    """The tensors in memory at one moment of a training step.

    Attributes:
        says: A text that says what has just happened: a tensor was saved or freed, or a layer recomputed.
        layer: The number, from 0, of the layer in which this happened.
        held: For each layer, rows of the saved tensors that are in memory.
        again: Whether a layer has just been recomputed.
    """

    says: str
    layer: int
    held: tuple[tuple[Row, ...], ...]
    again: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of the saved tensors of all layers together."""
        return sum(total(rows) for rows in self.held)


@cache
def training_moments(shape: ModelShape, recompute: str = "none") -> tuple[Moment, ...]:
    """Return the moments of one training step: one for each tensor that is saved or freed, and for each recomputation.

    In the first and the last moment nothing is in memory. Backward frees a layer's tensors in reverse order. When it
    needs a tensor that forward didn't save, all tensors that this layer didn't save are recomputed first.

    Args:
        shape: the model's sizes, with ``num_layers``.
        recompute: what backward recomputes: "none", "selective" or "full".
    """
    all_rows, kept = layer_rows(shape), {row.term for row in layer_rows(shape, recompute=recompute)}
    held: list[list[Row]] = [[] for _ in range(shape.num_layers)]
    moments = [Moment("before the forward pass", 0, _frozen(held))]
    for layer, rows in enumerate(held):
        for row in all_rows:
            if row.term in kept:
                rows.append(row)
                moments.append(Moment(f"forward, layer {layer}: {row.term} is saved", layer, _frozen(held)))
    for layer in reversed(range(shape.num_layers)):
        in_memory = {row.term for row in held[layer]}
        for row in reversed(all_rows):
            if row.term not in in_memory:
                held[layer] = list(all_rows[: all_rows.index(row) + 1])
                in_memory = {each.term for each in held[layer]}
                says = f"backward, layer {layer}: what wasn't saved is recomputed"
                moments.append(Moment(says, layer, _frozen(held), again=True))
            held[layer].pop()
            moments.append(Moment(f"backward, layer {layer}: {row.term} is freed", layer, _frozen(held)))
    return tuple(moments)


def _frozen(held: Sequence[Sequence[Row]]) -> tuple[tuple[Row, ...], ...]:
    return tuple(map(tuple, held))


def fullest_bytes(shape: ModelShape, recompute: Recompute | str, parallel: Parallel = Parallel()) -> int:
    """Return the peak bytes of a rank's layers in backward: what all layers have saved, and one recomputed layer.

    Args:
        shape: the model's sizes, with ``num_layers``.
        recompute: what backward recomputes: "none", "selective", "full", or a ``Recompute``.
        parallel: how ranks share a layer; by default they don't.
    """
    all_bytes, kept = total(layer_rows(shape, parallel)), total(layer_rows(shape, parallel, recompute))
    return shape.num_layers * kept + (all_bytes - kept)
