"""Activation bytes with pipeline parallelism: equations 5 and 6, the interleave factor, section 4.3.

Closed forms only: ``formulas.stage_terms`` adds up named tensors instead, ``actmem.formulas.schedule`` counts a
real order of actions, and each checks the others.  Every byte count is an exact integer.
"""

from __future__ import annotations

from fractions import Fraction

from actmem.config import ConfigError, ModelShape, Parallel, check_divides, check_layer, check_size
from actmem.formulas.activations import eq4, layer_bytes
from actmem.recipes import Recompute


def eq5(shape: ModelShape, tensor_parallel_size: int, element_size: int = 2) -> int:
    """Bytes of the first stage's layers: (sbhL/t)(34 + 5as/h) in 16 bits, whatever p is.

    Stage 0 holds p microbatches of L/p layers each.  2205.05198 eq. 5.
    """
    return eq4(shape, tensor_parallel_size, element_size) * shape.num_layers


def eq6(shape: ModelShape, tensor_parallel_size: int, element_size: int = 2) -> int:
    """The same with selective recomputation: 34sbhL/t in 16 bits.  2205.05198 eq. 6."""
    return layer_bytes(shape, Parallel(tensor_parallel_size, True), "selective", element_size) * shape.num_layers


def selective_saves(shape: ModelShape) -> Fraction:
    """The share of a layer's bytes that selective recomputation drops: 5as/h of 34 + 5as/h.  Section 5."""
    a, _, h, s = shape.letters()
    return Fraction(5 * a * s, 34 * h + 5 * a * s)


def full_recompute_bytes(
    shape: ModelShape, tensor_parallel_size: int, sharded_inputs: bool = False, element_size: int = 2
) -> int:
    """Bytes of the first stage with full recomputation: 2sbhL, or 2sbhL/t if each rank keeps a
    part of every layer's input, which costs one more all-gather a layer.  Section 5."""
    check_layer(shape, Parallel(tensor_parallel_size, sequence_parallel=sharded_inputs))
    _, b, h, s = shape.letters()
    e, layers = element_size, shape.num_layers
    return e * s * b * h * layers // (tensor_parallel_size if sharded_inputs else 1)


def interleave_factor(pipeline_parallel_size: int, num_model_chunks: int) -> Fraction:
    """The factor by which interleaving raises the first stage's bytes: 1 + (p − 1)/(pm); 1 without it.

    Section 4.2.3.  With m = 1 the paper means plain 1F1B, not interleaving with one chunk.
    """
    p, m = (
        check_size("pipeline_parallel_size", pipeline_parallel_size),
        check_size("num_model_chunks", num_model_chunks),
    )
    return Fraction(p * m + p - 1, p * m) if m > 1 else Fraction(1)


def layers_per_chunk(shape: ModelShape, parallel: Parallel) -> int:
    """L/(pm).  Raises ConfigError if L is not divisible by p·m."""
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    name = "pipeline_parallel_size" if m == 1 else "pipeline_parallel_size · num_model_chunks"
    return check_divides("num_layers", shape.num_layers, name, p * m)


def in_flight(
    parallel: Parallel,
    pipeline_rank: int = 0,
    num_microbatches: int | None = None,
    microbatches_per_round: int | None = None,
) -> int:
    """Most chunk-microbatches that a rank holds at once: forward done, backward not.

    1F1B: min(p − r, n).  Interleaved: min((m − 1)g + 2(p − 1 − r) + 1, nm), which is pm + p − 1
    on rank 0 for g = p.  num_microbatches (n): by default, enough to fill the pipeline.  microbatches_per_round (g):
    default p, Megatron's; torch's may differ (``schedule.torch_microbatches_per_round``).
    """
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    check_pipeline_rank(parallel, pipeline_rank)
    for name, size in (("num_microbatches", num_microbatches), ("microbatches_per_round", microbatches_per_round)):
        if size is not None:
            check_size(name, size)
    if m == 1:
        most = p - pipeline_rank
    else:
        g = _per_round(parallel, num_microbatches, microbatches_per_round)
        most = (m - 1) * g + 2 * (p - 1 - pipeline_rank) + 1
    return most if num_microbatches is None else min(most, num_microbatches * m)


def embeddings_in_flight(
    parallel: Parallel, num_microbatches: int | None = None, microbatches_per_round: int | None = None
) -> int:
    """Microbatches of the first chunk, which has the embedding, at rank 0's peak.

    1F1B: min(p, n), the p of section 4.3.  Interleaved: min(2g, n), because a second round of
    forwards enters the first chunk before any backward reaches it.
    """
    if parallel.num_model_chunks == 1:
        return in_flight(parallel, 0, num_microbatches)
    most = 2 * _per_round(parallel, num_microbatches, microbatches_per_round)
    return most if num_microbatches is None else min(most, num_microbatches)


def first_stage_bytes(
    shape: ModelShape,
    parallel: Parallel,
    recompute: Recompute | str = "none",
    num_microbatches: int | None = None,
    element_size: int = 2,
    microbatches_per_round: int | None = None,
) -> int:
    """Bytes of the layers on pipeline rank 0: equations 5 and 6 with the interleave factor.

    With enough microbatches this is L(1 + (p − 1)/(pm)) layers; with fewer, those in flight.
    """
    count = in_flight(parallel, 0, num_microbatches, microbatches_per_round)
    return count * layers_per_chunk(shape, parallel) * layer_bytes(shape, parallel, recompute, element_size)


def section43_extras(shape: ModelShape, tensor_parallel_size: int, pipeline_parallel_size: int) -> int:
    """What section 4.3 adds to equation 5, as printed: (sbhL/t)(p/L + δ(p=1)(4/L)(1 + v/h)).

    16-bit activations, float32 logits, sequence parallelism; p embedding masks, also when
    interleaved (see ``embeddings_in_flight`` for what the interleaved order holds).
    """
    check_layer(shape, Parallel(tensor_parallel_size, sequence_parallel=True))
    _, b, h, s = shape.letters()
    t, p, v = tensor_parallel_size, check_size("pipeline_parallel_size", pipeline_parallel_size), shape.vocab_size
    check_divides("vocab_size", v, "tensor_parallel_size", t)
    ends = (4 * s * b * h + 4 * s * b * v) // t if p == 1 else 0
    return s * b * h * p // t + ends


def bubble_fraction(parallel: Parallel, num_microbatches: int) -> Fraction:
    """Idle time divided by working time: (p − 1)/(nm).  2104.04473; sending takes no time."""
    n = check_size("num_microbatches", num_microbatches)
    return Fraction(parallel.pipeline_parallel_size - 1, n * parallel.num_model_chunks)


def check_pipeline_rank(parallel: Parallel, pipeline_rank: int) -> None:
    """Raise ConfigError if there is no such pipeline rank."""
    p = parallel.pipeline_parallel_size
    if not 0 <= pipeline_rank < p:
        raise ConfigError("pipeline_rank", f"must be from 0 to {p - 1}, got {pipeline_rank}")


def _per_round(parallel: Parallel, num_microbatches: int | None, microbatches_per_round: int | None) -> int:
    p, n = parallel.pipeline_parallel_size, num_microbatches
    if microbatches_per_round is None:
        if n is not None:
            check_divides("num_microbatches", n, "pipeline_parallel_size", p)
        return p
    if n is not None:
        check_divides("num_microbatches", n, "microbatches_per_round", microbatches_per_round)
    return microbatches_per_round
