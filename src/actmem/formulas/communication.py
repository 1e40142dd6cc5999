"""Collectives between ranks, and the bytes that a ring sends for them.

One layer, forward and backward, in units of (t − 1)/t · 2sbh bytes sent by each rank:

                          tensor parallel     tensor + sequence parallel
    forward               2 all-reduces   4   2 all-gathers + 2 reduce-scatters   4
    backward              2 all-reduces   4   2 all-gathers + 2 reduce-scatters   4
    backward, inputs                      0   2 all-gathers                       2
    sum                                   8                                      10

A ring all-reduce is a reduce-scatter followed by an all-gather, so "the same bytes" (2205.05198
section 4.2.2) holds for the first two lines.  It doesn't hold with the third line: each rank saves only its
shard of the inputs of the two column-parallel matmuls, so backward gathers these inputs again, and the sum is 10
instead of 8.  The plain form saves the gathered inputs: it sends 8, and needs more memory (``gathered_input_bytes``).
Recomputation repeats collectives of the forward pass.  ``paper-full`` repeats all of them, 4 units in both columns.
``full`` stops before the layer's last collective: 2 units without and 3 with sequence parallelism.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from actmem.config import ModelShape, Parallel, check_choice, check_layer, check_size
from actmem.recipes import PAPER_LAYER, Recompute

#: How often each rank sends its share, payload / ranks, to its neighbour: once a step around the ring.
_RING_ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}

#: Where a layer's collective stands: f or g at a block's input, f̄ or ḡ at its output, or the second gather of an
#: input.
INPUT, OUTPUT, INPUT_AGAIN = "input", "output", "input again"


@dataclass(frozen=True)
class PredictedCollective:
    """One or more equal collectives, ``count`` of them, in which one rank takes part.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".
        phase: "forward", "recompute", "backward" or "step" (once an iteration).
        ranks: how many ranks take part.
        payload_bytes: bytes of one collective's unsharded tensor, all ranks' shards together. For an all-to-all: the
            bytes that one rank has for all ranks, itself included, the same amount for each.
        count: how many such collectives there are.
        place: where in the layer they run. ``INPUT``: at the input of attention or MLP. ``OUTPUT``: at the output of
            attention or MLP. ``INPUT_AGAIN``: where backward gathers that input a second time. Llama's layers
            (``actmem_more``) have more places.
    """

    kind: str
    phase: str
    ranks: int
    payload_bytes: int
    count: int = 1
    place: str = ""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, (*_RING_ROUNDS, "send"))
        check_size("ranks", self.ranks)
        check_size("payload_bytes", self.payload_bytes, math.inf, least=0)
        check_size("count", self.count, math.inf, least=0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends for all ``count`` collectives.

        With t ranks an all-reduce sends 2(t − 1)/t of the payload; an all-gather, a reduce-scatter or an all-to-all
        sends (t − 1)/t of it; a send sends the payload itself. A payload that t does not divide is rounded up to t
        equal shares.
        """
        if self.kind == "send":
            return self.count * self.payload_bytes
        share = -(-self.payload_bytes // self.ranks)
        return self.count * _RING_ROUNDS[self.kind] * (self.ranks - 1) * share


def wire_bytes(collectives: Iterable[PredictedCollective]) -> int:
    """Return the bytes that one rank sends for all of these collectives."""
    return sum(collective.wire_bytes for collective in collectives)


def counts(collectives: Iterable[PredictedCollective]) -> dict[str, int]:
    """Return a dict from each kind, such as "all-reduce", to the number of its collectives."""
    sums: dict[str, int] = {}
    for collective in collectives:
        sums[collective.kind] = sums.get(collective.kind, 0) + collective.count
    return sums


def layer_collectives(
    shape: ModelShape,
    parallel: Parallel,
    recompute: Recompute | str = "none",
    element_size: int = 2,
    keep_gathered_input: bool = False,
) -> list[PredictedCollective]:
    """List the collectives that one tensor-parallel rank runs in one layer for one microbatch.

    Args:
        shape: the sizes of the layer.
        parallel: how the ranks share the layer; only t and ``sequence_parallel`` are read.
        recompute: a mode of recomputation, or its name, such as "selective".
        element_size: bytes of an activation element.
        keep_gathered_input: True for the plain form of sequence parallelism, which saves the gathered inputs and so
            doesn't gather them again in backward.

    Returns: one entry for each kind, phase and place; none for t = 1.
    Raises: ConfigError if t ranks can't share the layer.
    Source: 2205.05198 section 4.2.
    """
    check_layer(shape, parallel, element_size)
    t, size = parallel.tensor_parallel_size, activation_bytes(shape, element_size)
    if t == 1:
        return []

    def each(kind: str, phase: str, place: str, count: int = 2) -> PredictedCollective:
        return PredictedCollective(kind, phase, t, size, count, place)

    # A block's first matmul needs the gathered sequence, and its last leaves partial sums.
    matmuls = PAPER_LAYER.recomputed_matmuls(recompute)
    starts_again = len(matmuls & {"QKV projection", "h→4h"})
    ends_again = len(matmuls & {"attention projection", "4h→h"})
    if not parallel.sequence_parallel:
        rows = [
            each("all-reduce", "forward", OUTPUT),
            each("all-reduce", "recompute", OUTPUT, ends_again),
            each("all-reduce", "backward", INPUT),
        ]
    else:
        rows = [
            each("all-gather", "forward", INPUT),
            each("reduce-scatter", "forward", OUTPUT),
            each("all-gather", "recompute", INPUT, starts_again),
            each("reduce-scatter", "recompute", OUTPUT, ends_again),
            each("all-gather", "backward", OUTPUT),
            each("reduce-scatter", "backward", INPUT),
            each("all-gather", "backward", INPUT_AGAIN, 0 if keep_gathered_input else 2),
        ]
    return [row for row in rows if row.count]


def activation_bytes(shape: ModelShape, element_size: int) -> int:
    """Return the bytes of one activation ``[s, b, h]`` with ``element_size`` bytes an element."""
    _, b, h, s = shape.letters()
    return element_size * s * b * h
