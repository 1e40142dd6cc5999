"""Activation bytes of an MLP of experts, which the ranks of a layer share, each expert whole."""

from __future__ import annotations

from actmem.checks import ConfigError, check_choice, check_divides, check_size, checked
from actmem.config import Parallel
from actmem.llama_shape import LlamaShape, check_llama_ranks
from actmem.rows import Row

#: Bytes of a token's or an expert's number, and the least of a routing weight.
INDEX, WEIGHT = 8, 4


@checked
def expert_mlp_rows(
    shape: LlamaShape, parallel: Parallel = Parallel(), element_size: int = 2, routed_tokens: int | None = None
) -> list[Row]:
    """What the router and this rank's experts keep; no token is dropped.

    routed_tokens (R): pairs of a token and an expert that this rank's experts take; None: as many as
    every other rank's, sbκ/t.  In 16 bits and without parallelism: 2sbh + 20sbκ + 4R + 6Rf, and 6sb times
    the width of the experts that all tokens share.  Under sequence parallelism the ranks' R add up to sbκ
    and all else is divided by t.  A sigmoid in place of the softmax keeps as much.  Raises ConfigError
    on a layer without experts, if t ranks can't share it, or on more tokens than can be routed there.
    """
    most = most_routed_tokens(shape, parallel)
    check_llama_ranks(shape, parallel)
    e, t, taken = element_size, parallel.tensor_parallel_size, shape.experts_per_token or 0
    pairs = shape.seq_length * shape.micro_batch_size * taken
    if routed_tokens is None:
        routed_tokens = check_divides("routed_tokens", pairs, "tensor_parallel_size", t)
    check_size("routed_tokens", routed_tokens, most, least=0)
    whole = parallel.sequence_parts
    own, weight = pairs // whole, max(e, WEIGHT)
    wide = e * routed_tokens * shape.ffn_hidden_size
    shared = e * (pairs // taken) * shape.shared_ffn_size // t
    weighing = "sigmoid of the chosen scores" if shape.sigmoid_router else "softmax over the chosen experts"
    rows = [
        Row("router input", e * own // taken * shape.hidden_size, whole, "router; the experts dispatch it again"),
        Row("chosen experts", INDEX * own, whole, "routing weights"),
        Row("routing weights", weight * own, whole, weighing),
        Row("dispatch order", INDEX * own, whole, "pairs sorted by expert"),
        Row("dispatched weights", weight * routed_tokens, t, "SwiGLU: one number a pair"),
        Row("gate", wide, t, "SwiGLU of the experts"),
        Row("up", wide, t, "SwiGLU of the experts"),
        Row("down input", wide, t, "down products of the experts"),
    ]
    if shared:
        rows += [
            Row("shared gate", shared, t, "SwiGLU of the shared experts"),
            Row("shared up", shared, t, "SwiGLU of the shared experts"),
            Row("shared down input", shared, t, "down product of the shared experts"),
        ]
    return rows


@checked
def most_routed_tokens(shape: LlamaShape, parallel: Parallel = Parallel()) -> int:
    """The worst rank under imbalance: every token takes as many of its experts as a token can: sb · min(κ, E/t)."""
    if not shape.num_experts or not shape.experts_per_token:
        raise ConfigError("shape", "this layer has no experts")
    held = check_divides("num_experts", shape.num_experts, "tensor_parallel_size", parallel.tensor_parallel_size)
    return shape.seq_length * shape.micro_batch_size * min(shape.experts_per_token, held)


@checked
def forced_routed_tokens(shape: LlamaShape, parallel: Parallel, routing: str, rank: int) -> int:
    """R of a rank if the router's scores are ignored.

    routing: "even" (each sender's pairs go to the experts in turn), or "one-sided" (every token's go to
    the first κ experts).  Raises ConfigError on another one, or a rank that is not among the t.
    """
    most_routed_tokens(shape, parallel)
    check_llama_ranks(shape, parallel)
    check_choice("routing", routing, ("even", "one-sided"))
    t, experts, taken = parallel.tensor_parallel_size, shape.num_experts or 0, shape.experts_per_token or 0
    check_size("rank", rank, t - 1, least=0)
    senders = parallel.sequence_parts
    tokens = shape.seq_length * shape.micro_batch_size // senders
    own = range(rank * experts // t, (rank + 1) * experts // t)
    if routing == "one-sided":
        return senders * sum(tokens for expert in own if expert < taken)
    each, more = divmod(tokens * taken, experts)
    return senders * sum(each + (expert < more) for expert in own)
