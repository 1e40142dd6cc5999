"""Today's layer under context parallelism: c ranks share each sequence, beside the t that share the weights.

What it divides beyond sequence parallelism.  Tensor parallelism divides K and V among at most k ranks, one head
each, and sequence parallelism divides by t only what tensor parallelism leaves whole.  Context parallelism cuts
all that lies along the sequence, K and V too, by c for any k.  It divides no weight, and each weight's
gradient is summed over the c ranks, as over data-parallel ones.

One layer, forward and backward, in exchanges among the c ranks:

    gather          all-gather K and V; in backward again, and reduce-scatter their gradients    2 + 2 + 2
    gather-plain    without the second gather: K and V stay whole on every rank                  2 + 2
    ulysses         all-to-all Q, K, V and the result; in backward their gradients               4 + 4
"""

from __future__ import annotations

from dataclasses import replace

from actmem.checks import checked
from actmem.config import Parallel
from actmem.formulas.communication import Exchange
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LlamaShape, llama_layer_terms, own_context_shape, ulysses_layer_terms
from actmem.recipes import LayerTerms, Recompute
from actmem.rows import Row


@checked
def context_rows(
    shape: LlamaShape,
    parallel: Parallel = Parallel(),
    context_parallel_size: int = 1,
    context_kind: str = "gather",
    recompute: Recompute | str = "none",
    element_size: int = 2,
    routed_tokens: int | None = None,
) -> list[Row]:
    """The tensors that one layer keeps for backward on one of t·c ranks.  shape: with the whole sequence.

    "gather": those of ``llama_rows`` for s/c tokens.  "gather-plain": K and V of all s.  "ulysses": attention's
    result twice, because the kernel keeps it by heads and the projection by tokens; *elementwise* drops one.
    routed_tokens: of experts, on this rank, see ``expert_mlp_rows``.  Raises ConfigError if the ranks can't share the layer.
    """
    c = context_parallel_size
    own = own_context_shape(shape, parallel, c, context_kind)
    if c == 1:
        return llama_rows(shape, parallel, recompute, element_size, routed_tokens)
    rows = []
    for row in llama_rows(own, parallel, "none", element_size, routed_tokens):
        if row.term in ("K", "V") and context_kind == "gather-plain":
            rows.append(replace(row, bytes=c * row.bytes, source="attention, gathered"))
            continue
        row = replace(row, split_by=c * row.split_by)
        if row.term == "attention projection input" and context_kind == "ulysses":
            rows.append(replace(row, term="attention output before all-to-all", source="attention"))
        rows.append(row)
    dropped = _terms(shape, context_kind).dropped(recompute)
    return [row for row in rows if row.term not in dropped]


@checked
def context_exchanges(
    shape: LlamaShape,
    parallel: Parallel = Parallel(),
    context_parallel_size: int = 1,
    context_kind: str = "gather",
    recompute: Recompute | str = "none",
    element_size: int = 2,
) -> list[Exchange]:
    """Exchanges of one microbatch in one layer among the c ranks; none for c = 1.

    Weights' gradients are not among them: once an iteration, with the data-parallel ranks'.
    Raises ConfigError if the ranks can't share the layer.
    """
    c, t = context_parallel_size, parallel.tensor_parallel_size
    own = own_context_shape(shape, parallel, c, context_kind)
    if c == 1:
        return []
    dropped = _terms(shape, context_kind).dropped(recompute)
    one_head = element_size * own.seq_length * own.micro_batch_size * own.d
    key = one_head * max(own.num_key_value_heads // t, 1)
    query = one_head * (own.num_attention_heads // t)
    again = _made_again(shape, dropped)
    if context_kind == "ulysses":
        sizes = {"Q": query, "K": key, "V": key, "the result": query}
        return [
            Exchange("all-to-all", phase, f"{what}, {way}", c, size)
            for phase, way in (("forward", "to heads or back"), ("recompute", "again"), ("backward", "gradients"))
            for what, size in sizes.items()
            if phase != "recompute" or what in again
        ]
    gathers = {"forward": 2, "backward": 2}
    if context_kind == "gather-plain":
        gathers = {"forward": 2, "recompute": len(again & {"K", "V"})}
    elif again & {"attention"}:
        gathers["recompute"] = 2
    return [
        *(Exchange("all-gather", phase, "K and V", c, c * key, count) for phase, count in gathers.items() if count),
        Exchange("reduce-scatter", "backward", "K and V, gradients", c, c * key, 2),
    ]


def _terms(shape: LlamaShape, context_kind: str) -> LayerTerms:
    return ulysses_layer_terms(shape) if context_kind == "ulysses" else llama_layer_terms(shape)


def _made_again(shape: LlamaShape, dropped: frozenset[str]) -> set[str]:
    """What backward makes again of what goes between ranks: a call makes all of its results, whichever is asked for."""
    projected = {"Q before its norm", "K before its norm", "V"} if shape.qk_norm else {"Q", "K", "V"}
    query, key = ({"Q"}, {"K"}) if shape.qk_norm else (projected, projected)
    made_with = {
        "Q": query,
        "K": key,
        "V": projected,
        "attention": {"log-sum-exp", "attention projection input"},
        "the result": {"attention projection input"},
    }
    return {what for what, terms in made_with.items() if dropped & terms}
