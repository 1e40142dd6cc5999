"""Collectives between ranks, and the bytes that a ring sends for them.

One layer, forward and backward, in units of (t − 1)/t · 2sbh bytes sent by each rank:

                          tensor parallel     tensor + sequence parallel
    forward               2 all-reduces   4   2 all-gathers + 2 reduce-scatters   4
    backward              2 all-reduces   4   2 all-gathers + 2 reduce-scatters   4
    gathered again                        0   2 all-gathers                       2
    sum                                   8                                      10

A ring all-reduce is a reduce-scatter followed by an all-gather, so "the same bytes" (2205.05198
section 4.2.2) holds for the first two lines.  The third line breaks it: each rank keeps only its
shard of the inputs of the two column-parallel matmuls, so backward gathers them again, 10 to 8.  The
plain form keeps the gathered inputs: it sends 8, and pays in memory (``gathered_input_bytes``).
Recomputation repeats forward's collectives in both columns: 4 for ``paper-full``; for ``full``,
which ends before the layer's last collective, 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from actmem.config import ModelShape, Parallel, check_choice, check_layer, check_size
from actmem.formulas.first_stage import check_stage, layers_per_chunk
from actmem.recipes import PAPER_LAYER, Recompute

#: How often each rank sends its share, payload / ranks, to its neighbour: once a step around the ring.
_RING_ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


@dataclass(frozen=True)
class Exchange:
    """A number of equal collectives that one rank takes part in.

    kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".  ranks: how many take part.
    payload_bytes: of one collective; the whole tensor, all ranks' shards together.  Of an all-to-all: what one
    rank has for all ranks, itself too, as much for each.
    phase: "forward", "recompute", "backward" or "step" (once an iteration).
    """

    kind: str
    phase: str
    where: str
    ranks: int
    payload_bytes: int
    count: int = 1

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, (*_RING_ROUNDS, "send"))
        check_size("ranks", self.ranks)
        check_size("payload_bytes", self.payload_bytes, math.inf, least=0)
        check_size("count", self.count, math.inf, least=0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends for all ``count``: all-reduce 2(t − 1)/t of the payload,
        all-gather, reduce-scatter and all-to-all (t − 1)/t, a send all of it.

        A payload that t does not divide is rounded up to t equal shares.
        """
        if self.kind == "send":
            return self.count * self.payload_bytes
        share = -(-self.payload_bytes // self.ranks)
        return self.count * _RING_ROUNDS[self.kind] * (self.ranks - 1) * share


def wire_bytes(exchanges: Iterable[Exchange]) -> int:
    """Bytes that one rank sends for all of them."""
    return sum(exchange.wire_bytes for exchange in exchanges)


def counts(exchanges: Iterable[Exchange]) -> dict[str, int]:
    """How many of each kind."""
    sums: dict[str, int] = {}
    for exchange in exchanges:
        sums[exchange.kind] = sums.get(exchange.kind, 0) + exchange.count
    return sums


def layer_exchanges(
    shape: ModelShape,
    parallel: Parallel,
    recompute: Recompute | str = "none",
    element_size: int = 2,
    keep_gathered_input: bool = False,
) -> list[Exchange]:
    """Collectives of one microbatch in one layer on one tensor-parallel rank; none for t = 1.

    keep_gathered_input: the plain form of sequence parallelism.  Raises ConfigError if t ranks
    can't share the layer.  2205.05198 section 4.2.
    """
    check_layer(shape, parallel)
    t, size = parallel.tensor_parallel_size, _activation_bytes(shape, element_size)
    if t == 1:
        return []

    def each(kind: str, phase: str, where: str, count: int = 2) -> Exchange:
        return Exchange(kind, phase, where, t, size, count)

    # A block's first matmul needs the gathered sequence, and its last leaves partial sums.
    products = PAPER_LAYER.products_again(recompute)
    starts_again = len(products & {"QKV projection", "h→4h"})
    ends_again = len(products & {"attention projection", "4h→h"})
    if not parallel.sequence_parallel:
        rows = [
            each("all-reduce", "forward", "f̄, attention and MLP"),
            each("all-reduce", "recompute", "f̄ again", ends_again),
            each("all-reduce", "backward", "f, attention and MLP"),
        ]
    else:
        rows = [
            each("all-gather", "forward", "g, attention and MLP"),
            each("reduce-scatter", "forward", "ḡ, attention and MLP"),
            each("all-gather", "recompute", "g again", starts_again),
            each("reduce-scatter", "recompute", "ḡ again", ends_again),
            each("all-gather", "backward", "ḡ, attention and MLP"),
            each("reduce-scatter", "backward", "g, attention and MLP"),
            each("all-gather", "backward", "inputs of QKV and h→4h, gathered again", 0 if keep_gathered_input else 2),
        ]
    return [row for row in rows if row.count]


def ends_exchanges(
    shape: ModelShape, parallel: Parallel, pipeline_rank: int = 0, element_size: int = 2
) -> list[Exchange]:
    """Collectives of one microbatch in the embedding (rank 0) and in the output layer and loss (rank p − 1)."""
    check_stage(shape, parallel, pipeline_rank)
    t, size = parallel.tensor_parallel_size, _activation_bytes(shape, element_size)
    if t == 1:
        return []
    sequence = parallel.sequence_parallel
    reduction = "reduce-scatter" if sequence else "all-reduce"
    rows = []
    if pipeline_rank == 0:
        rows = [Exchange(reduction, "forward", "embedding", t, size)]
        rows += [Exchange("all-gather", "backward", "embedding", t, size)] * sequence
    if pipeline_rank == parallel.pipeline_parallel_size - 1:
        gather = Exchange("all-gather", "forward", "output layer", t, size)
        again = Exchange("all-gather", "backward", "input of the output layer, gathered again", t, size)
        numbers = max(element_size, 4) * shape.seq_length * shape.micro_batch_size
        rows += [gather, again] * sequence
        rows.append(Exchange(reduction, "backward", "output layer", t, size))
        rows.append(Exchange("all-reduce", "forward", "largest logit of each token", t, numbers))
        rows.append(Exchange("all-reduce", "forward", "sum and target logit of each token", t, 2 * numbers))
    return rows


def step_exchanges(
    shape: ModelShape, parallel: Parallel, pipeline_rank: int = 0, element_size: int = 2
) -> list[Exchange]:
    """Collectives of gradients on one rank, once an iteration, in the parameters' dtype.

    Under sequence parallelism each rank has the gradients of layer norms, of the biases after ḡ
    and of positions from its own tokens only: one all-reduce for each chunk.  With p > 1 the
    two copies of the word embedding are added up between the first and the last stage.
    """
    check_stage(shape, parallel, pipeline_rank)
    _, _, h, s = shape.letters()
    e, t, p = element_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    per_chunk, rows = layers_per_chunk(shape, parallel), []
    if t > 1 and parallel.sequence_parallel:
        for chunk in range(parallel.num_model_chunks):
            elements = 6 * h * per_chunk
            if pipeline_rank == 0 and chunk == 0:
                elements += s * h
            if pipeline_rank == p - 1 and chunk == parallel.num_model_chunks - 1:
                elements += 2 * h
            rows.append(Exchange("all-reduce", "step", f"gradients seen in parts, chunk {chunk}", t, e * elements))
    if p > 1 and pipeline_rank in (0, p - 1):
        rows.append(
            Exchange("all-reduce", "step", "word embedding, first and last stage", 2, e * shape.vocab_size * h // t)
        )
    return rows


def pipeline_sends(
    shape: ModelShape, parallel: Parallel, num_microbatches: int, pipeline_rank: int = 0, element_size: int = 2
) -> list[Exchange]:
    """What one rank sends to the neighbouring stages in an iteration: outputs forward, gradients back.

    2sbh bytes each in 16 bits, 2sbh/t under sequence parallelism.  With m chunks a rank sends m
    times as often.
    """
    check_stage(shape, parallel, pipeline_rank)
    n, m, p = num_microbatches, parallel.num_model_chunks, parallel.pipeline_parallel_size
    check_size("num_microbatches", n)
    size = _activation_bytes(shape, element_size) // parallel.sequence_parts
    forward = n * (m - (pipeline_rank == p - 1))  # the last stage of the model sends nothing on
    backward = n * (m - (pipeline_rank == 0))
    rows = [
        Exchange("send", "forward", "outputs, to the next stage", 2, size, forward),
        Exchange("send", "backward", "gradients, to the stage before", 2, size, backward),
    ]
    return [row for row in rows if row.count]


def iteration_exchanges(
    shape: ModelShape,
    parallel: Parallel,
    num_microbatches: int,
    pipeline_rank: int = 0,
    recompute: Recompute | str = "none",
    element_size: int = 2,
) -> list[Exchange]:
    """All collectives of one rank in one iteration of n microbatches, without data parallelism."""
    n = check_size("num_microbatches", num_microbatches)
    layers = layers_per_chunk(shape, parallel) * parallel.num_model_chunks
    in_layers = layer_exchanges(shape, parallel, recompute, element_size)
    at_ends = ends_exchanges(shape, parallel, pipeline_rank, element_size)
    return [
        *(replace(exchange, count=exchange.count * layers * n) for exchange in in_layers),
        *(replace(exchange, count=exchange.count * n) for exchange in at_ends),
        *pipeline_sends(shape, parallel, n, pipeline_rank, element_size),
        *step_exchanges(shape, parallel, pipeline_rank, element_size),
    ]


def _activation_bytes(shape: ModelShape, element_size: int) -> int:
    _, b, h, s = shape.letters()
    return element_size * s * b * h
