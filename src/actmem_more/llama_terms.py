"""Activation bytes, FLOPs and collectives of Llama's layer.

The layer has RMSNorm, rotary positions, grouped queries, SwiGLU, and no dropout. A flash kernel computes attention, so
the scores are never stored: no term has as²b, and selective recomputation has nothing to drop. ``e`` is the bytes of
one activation element.

Three variants are covered too. Experts: each rank has some of them, each with all of its weights. Latent attention: the
letters are those of 2405.04434: the latents have q and c elements; a head's query and key have n elements without a
position and r with one; its value has v. Context parallelism: c ranks share each sequence, and t ranks the weights.

Why context parallelism, beside sequence parallelism: tensor parallelism divides K and V among at most k ranks, one head
each, and sequence parallelism divides by t only the tensors that tensor parallelism doesn't shard. Context parallelism
divides every tensor with a sequence dimension by c, K and V too, for any k. It shards no weight, so each weight's
gradient must be summed over the c ranks, as over data-parallel ranks.

Collectives of one layer among the c ranks, forward + backward:

    gather          all-gather K and V; in backward again, and reduce-scatter their gradients    2 + 2 + 2
    gather-plain    without the second gather: every rank saves all of K and V                   2 + 2
    ulysses         all-to-all Q, K, V and the result; in backward their gradients               4 + 4
"""

from dataclasses import replace

from actmem.config import ELEMENT_BYTES, ConfigError, ModelShape, Parallel, check_choice, check_divides, check_size
from actmem.formulas.communication import INPUT, INPUT_AGAIN, OUTPUT, PredictedCollective, layer_collectives
from actmem.recipes import Mode, Recompute
from actmem.rows import Row, on_device
from actmem_more.llama_shape import (
    LatentHeads,
    LlamaShape,
    check_llama_ranks,
    experts_of_a_rank,
    llama_layer_terms,
    own_context_shape,
)


def llama_rows(
    shape: LlamaShape,
    parallel: Parallel = Parallel(),
    recompute: Mode = "none",
    element_size: int = 2,
    routed_tokens: int | None = None,
    context_kind: str = "gather",
) -> list[Row]:
    """List the tensors that one layer saves for backward on one rank, in the order of the forward pass.

    In 16 bits and without parallelism these are 8sbh + 4sbad + 4sbkd + 6sbf + 4asb + 8sb bytes if nothing is
    recomputed, and 4sbh + 4sbad + 4sbkd + 4sbf + 4asb + 8sb under *elementwise*, which recomputes everything that needs
    no matmul; ad is h in most models. Under sequence parallelism every tensor is divided by t, as long as t <= k; with
    t > k every rank saves one head's K and V. With ``qk_norm`` the norms' inputs are saved too, and 4 bytes for each
    head and token. Latent attention saves its latents, and larger Q, K and V.

    One of c context-parallel ranks saves these tensors for s/c tokens under "gather". Under "gather-plain" K and V are
    those of all s tokens. Under "ulysses" attention's result is saved twice: the kernel saves all tokens of some heads,
    the projection some tokens of all heads; *elementwise* drops one of the two.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        parallel: how the ranks share the layer; tensor, sequence, context and expert parallelism are read.
        recompute: a mode's name such as "full", a set of tensors' names to drop, or a dict from names to actions such
            as "offload".
        element_size: bytes of an activation element.
        routed_tokens: only for a layer with experts: R, the pairs of a token and an expert that this rank's experts
            compute; None: sbκ/t.
        context_kind: how c ranks share a sequence: "gather", "gather-plain" or "ulysses".

    Raises: ConfigError if the ranks can't share the layer, or if a named tensor can't be recomputed.
    """
    shape = own_context_shape(shape, parallel, context_kind)
    check_choice("element_size", element_size, ELEMENT_BYTES)
    s, b, h, f = shape.seq_length, shape.micro_batch_size, shape.hidden_size, shape.ffn_hidden_size
    a, e, t = shape.num_attention_heads, element_size, parallel.tensor_parallel_size
    cut = parallel.sequence_parts
    wide = max(e, FLOAT32)
    rows = [
        Row("norm 1 input", e * s * b * h // cut, cut, "RMSNorm"),
        Row("norm 1 statistics", wide * s * b // cut, cut, "RMSNorm: 1/rms of each token"),
        Row("QKV projection input", e * s * b * h // cut, cut, "Q, K, V matmuls"),
        *(_latent_rows(shape, shape.latent, parallel, e) if shape.latent else _head_rows(shape, t, e)),
        Row("log-sum-exp", wide * a * s * b // t, t, "attention: one number a query"),
        Row("attention projection input", e * s * b * a * shape.value_size // t, t, "attention and projection"),
        Row("norm 2 input", e * s * b * h // cut, cut, "RMSNorm"),
        Row("norm 2 statistics", wide * s * b // cut, cut, "RMSNorm: 1/rms of each token"),
    ]
    if shape.num_experts:
        rows += expert_mlp_rows(shape, parallel, element_size, routed_tokens)
    elif routed_tokens is not None:
        raise ConfigError("routed_tokens", "this layer has no experts")
    else:
        rows += [
            Row("gate and up input", e * s * b * h // cut, cut, "gate and up matmuls"),
            Row("gate", e * s * b * f // t, t, "SwiGLU"),
            Row("up", e * s * b * f // t, t, "SwiGLU"),
            Row("down input", e * s * b * f // t, t, "down matmul"),
        ]
    c, ulysses = parallel.context_parallel_size, _is_ulysses(parallel, context_kind)
    if c > 1:
        rows = [shared for row in rows for shared in _context_rows(row, c, context_kind)]
    return on_device(rows, llama_layer_terms(shape, ulysses), recompute, element_size)


def _is_ulysses(parallel: Parallel, context_kind: str) -> bool:
    """Return whether several ranks share a sequence by all-to-alls from tokens to heads ("ulysses")."""
    return context_kind == "ulysses" and parallel.context_parallel_size > 1


def _context_rows(row: Row, c: int, context_kind: str) -> list[Row]:
    """Return the rows that one of c context-parallel ranks saves in place of ``row``, a row for this rank's tokens."""
    if row.term in ("K", "V") and context_kind == "gather-plain":
        return [replace(row, bytes=c * row.bytes, source="attention, gathered")]
    row = replace(row, split_by=c * row.split_by)
    if row.term == "attention projection input" and context_kind == "ulysses":
        return [replace(row, term="attention output before all-to-all", source="attention"), row]
    return [row]


def _head_rows(shape: LlamaShape, t: int, e: int) -> list[Row]:
    """List Q, K and V, and what their norms save if the model has these norms."""
    tokens, d, wide = shape.seq_length * shape.micro_batch_size, shape.d, max(e, FLOAT32)
    heads = {"Q": shape.num_attention_heads, "K": shape.num_key_value_heads}
    ranks = {name: min(t, count) for name, count in heads.items()}
    rows = []
    for name, count in heads.items():
        size = e * tokens * count * d // ranks[name]
        if shape.qk_norm:
            statistics = wide * tokens * count // ranks[name]
            rows += [
                Row(f"{name} before its norm", size, ranks[name], "RMSNorm over each head"),
                Row(f"{name} norm statistics", statistics, ranks[name], "RMSNorm: 1/rms of each head"),
            ]
        rows.append(Row(name, size, ranks[name], "attention, rotated"))
    return [*rows, Row("V", rows[-1].bytes, ranks["K"], "attention")]


def llama_matmuls(shape: LlamaShape) -> dict[str, int]:
    """Return the FLOPs of each matmul of one layer's forward pass of one microbatch, on all ranks together.

    The result is a dict from names such as "QKV projection" or "gate and up" (those in ``Recipe.matmuls``) to FLOPs.
    Attention counts all s² scores, as 2205.05198 appendix A does. The router's matmul counts once, even where every
    rank runs it on every token.
    """
    tokens, h, a, d = shape.seq_length * shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads, shape.d
    pairs = 2 * tokens * shape.seq_length * a
    f, taken, shared = shape.ffn_hidden_size, shape.experts_per_token or 1, shape.shared_ffn_size
    heads = {"QKV projection": 2 * tokens * h * (a + 2 * shape.num_key_value_heads) * d}
    router = {"router": 2 * tokens * h * shape.num_experts} if shape.num_experts else {}
    of_shared = {"shared gate and up": 4 * tokens * h * shared, "shared down": 2 * tokens * h * shared}
    return {
        **(_latent_matmuls(shape, shape.latent) if shape.latent else heads),
        "QKᵀ": pairs * d,
        "attention over V": pairs * shape.value_size,
        "attention projection": 2 * tokens * a * shape.value_size * h,
        **router,
        "gate and up": 4 * tokens * taken * h * f,
        "down": 2 * tokens * taken * h * f,
        **(of_shared if shared else {}),
    }


def llama_recomputed_flops(shape: LlamaShape, recompute: Mode) -> int:
    """Return the FLOPs that recomputing dropped tensors adds to one layer, on all ranks together.

    Args:
        shape: the sizes of the layer and of one microbatch.
        recompute: a mode's name such as "full", a set of tensors' names to drop, or a dict from names to actions.
    """
    matmuls = llama_matmuls(shape)
    return sum(matmuls[name] for name in llama_layer_terms(shape).recomputed_matmuls(recompute))


def _latent_rows(shape: LlamaShape, sizes: LatentHeads, parallel: Parallel, e: int) -> list[Row]:
    """List what latent attention saves from the two latents to Q, K and V, in the order of the forward pass.

    In 16 bits and without parallelism: 4sbq + 4sbc + 2sbr + 8sb bytes for the latents, before and after their norms,
    and 4sba(n + r) + 2sbav for the heads. The heads are divided by t. A latent is made from whole tokens, so only
    sequence parallelism divides it. The key's part with positions lies in the KV latent's tensor.
    """
    t, cut = parallel.tensor_parallel_size, parallel.sequence_parts
    tokens = shape.seq_length * shape.micro_batch_size // cut
    heads = e * shape.seq_length * shape.micro_batch_size * shape.num_attention_heads // t
    rows = []
    for name, rank, more in (("Q", sizes.query_rank, 0), ("KV", sizes.key_value_rank, sizes.rope_head_size)):
        rows += [
            Row(f"{name} latent", e * tokens * (rank + more), cut, "RMSNorm of the latent"),
            Row(f"{name} latent norm statistics", max(e, FLOAT32) * tokens, cut, "RMSNorm: 1/rms of each latent"),
            Row(f"{name} up-projection input", e * tokens * rank, cut, "up-projection to the heads"),
        ]
    return [
        *rows[:3],
        Row("Q", heads * shape.d, t, "attention, partly rotated"),
        *rows[3:],
        Row("K", heads * shape.d, t, "attention, partly rotated"),
        Row("V", heads * sizes.value_head_size, t, "attention"),
    ]


def _latent_matmuls(shape: LlamaShape, sizes: LatentHeads) -> dict[str, int]:
    """Return the FLOPs of the forward matmuls that make Q, K and V, on all ranks together.

    A latent's down-projection counts once, even where every rank runs it on every token.
    """
    tokens, h, a = shape.seq_length * shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads
    return {
        "Q down-projection": 2 * tokens * h * sizes.query_rank,
        "Q up-projection": 2 * tokens * sizes.query_rank * a * shape.d,
        "KV down-projection": 2 * tokens * h * (sizes.key_value_rank + sizes.rope_head_size),
        "KV up-projection": 2 * tokens * sizes.key_value_rank * a * (sizes.nope_head_size + sizes.value_head_size),
    }


#: Bytes of a norm's statistic, of a log-sum-exp and of a routing weight, which are float32 for every e up to 4.
FLOAT32 = 4
#: Bytes of an integer that says which token or which expert.
INDEX = 8


def expert_mlp_rows(
    shape: LlamaShape, parallel: Parallel = Parallel(), element_size: int = 2, routed_tokens: int | None = None
) -> list[Row]:
    """List what the router and this rank's experts save for backward; no token is dropped.

    In 16 bits and without parallelism the rows add up to 2sbh + 20sbκ + 4R + 6Rf bytes, and 6sb times the width of the
    shared experts. R is how many pairs of a token and an expert this rank's experts compute. Under sequence parallelism
    the R of all ranks add up to sbκ, and everything else is divided by t. A sigmoid router saves as much as a softmax
    router.

    Args:
        shape: the sizes of the layer, with this rank's part of the sequence.
        parallel: how the ranks share the layer; tensor, sequence and expert parallelism are read.
        element_size: bytes of an activation element.
        routed_tokens: R; None: sbκ/t, the same on every rank.

    Raises: ConfigError on a layer without experts, if t ranks can't share the layer, or if ``routed_tokens`` is more
        than ``most_routed_tokens``.
    """
    most_pairs = most_routed_tokens(shape, parallel)
    check_llama_ranks(shape, parallel)
    e, t, taken = element_size, parallel.tensor_parallel_size, shape.experts_per_token or 0
    pairs = shape.seq_length * shape.micro_batch_size * taken
    if routed_tokens is None:
        routed_tokens = check_divides("routed_tokens", pairs, "tensor_parallel_size", t)
    check_size("routed_tokens", routed_tokens, most_pairs, least=0)
    cut = parallel.sequence_parts
    sent_pairs, weight = pairs // cut, max(e, FLOAT32)
    expert_bytes = e * routed_tokens * shape.ffn_hidden_size
    shared_bytes = e * (pairs // taken) * shape.shared_ffn_size // t
    weighing = "sigmoid of the chosen scores" if shape.sigmoid_router else "softmax over the chosen experts"
    rows = [
        Row("router input", e * sent_pairs // taken * shape.hidden_size, cut, "router; the experts dispatch it again"),
        Row("chosen experts", INDEX * sent_pairs, cut, "routing weights"),
        Row("routing weights", weight * sent_pairs, cut, weighing),
        Row("dispatch order", INDEX * sent_pairs, cut, "pairs sorted by expert"),
        Row("dispatched weights", weight * routed_tokens, t, "SwiGLU: one number a pair"),
        Row("gate", expert_bytes, t, "SwiGLU of the experts"),
        Row("up", expert_bytes, t, "SwiGLU of the experts"),
        Row("down input", expert_bytes, t, "down matmul of the experts"),
    ]
    if shared_bytes:
        rows += [
            Row("shared gate", shared_bytes, t, "SwiGLU of the shared experts"),
            Row("shared up", shared_bytes, t, "SwiGLU of the shared experts"),
            Row("shared down input", shared_bytes, t, "down matmul of the shared experts"),
        ]
    return rows


def most_routed_tokens(shape: LlamaShape, parallel: Parallel = Parallel()) -> int:
    """Return the most pairs of a token and an expert that one rank's experts can get: sb · min(κ, E/t).

    They get the most if every token chooses as many of this rank's experts as it can. If ep > t ranks share the
    experts, the most is sb · ep/t · min(κ, E/ep).

    Args:
        shape: the sizes of the layer, with this rank's part of the sequence.
        parallel: how the ranks share the layer; tensor and expert parallelism are read.

    Raises: ConfigError on a layer without experts, or if the ranks can't share the experts evenly.
    """
    if not shape.num_experts or not shape.experts_per_token:
        raise ConfigError("shape", "this layer has no experts")
    held = experts_of_a_rank(shape.num_experts, parallel)
    senders = parallel.expert_ranks // parallel.tensor_parallel_size
    return senders * shape.seq_length * shape.micro_batch_size * min(shape.experts_per_token, held)


def forced_routed_tokens(shape: LlamaShape, parallel: Parallel, routing: str, rank: int) -> int:
    """Return how many pairs of a token and an expert one rank's experts compute under a forced routing.

    Args:
        shape: the sizes of the layer, with this rank's part of the sequence.
        parallel: how the ranks share the layer; tensor, sequence and expert parallelism are read.
        routing: "even" (a sender's pairs go to all experts in turn), or "one-sided" (every token goes to the first κ
            experts). Neither depends on the router's scores.
        rank: the number of the rank among the ranks that share experts, from 0.

    Raises: ConfigError on another routing, or on a rank that is not among those that share experts.
    """
    most_routed_tokens(shape, parallel)
    check_llama_ranks(shape, parallel)
    check_choice("routing", routing, ("even", "one-sided"))
    ranks, experts, taken = parallel.expert_ranks, shape.num_experts or 0, shape.experts_per_token or 0
    check_size("rank", rank, ranks - 1, least=0)
    senders = parallel.sequence_parts * (ranks // parallel.tensor_parallel_size)
    tokens = shape.seq_length * shape.micro_batch_size // parallel.sequence_parts
    rank_experts = range(rank * experts // ranks, (rank + 1) * experts // ranks)
    if routing == "one-sided":
        return senders * sum(tokens for expert in rank_experts if expert < taken)
    each, more = divmod(tokens * taken, experts)
    return senders * sum(each + (expert < more) for expert in rank_experts)


#: The place of collectives for the experts' tokens, and of those that gather K and V among context-parallel ranks.
EXPERT_EXCHANGE, CONTEXT_EXCHANGE = "experts", "K and V"


def _of_latents(row: PredictedCollective, sizes: LatentHeads, bytes_each: int) -> list[PredictedCollective]:
    """Return the collectives that latent attention runs in place of those of the paper's layer.

    Args:
        row: a collective of the paper's layer.
        sizes: the sizes of the latents.
        bytes_each: bytes of one element of every token.
    """
    if row.place == OUTPUT:
        return [row]
    widths = [sizes.query_rank, sizes.key_value_rank]
    if row.place != INPUT_AGAIN:  # which is of matmuls' inputs: the key that all heads share is none
        widths.append(sizes.rope_head_size)
    latents = [replace(row, count=1, payload_bytes=bytes_each * width) for width in widths]
    return [replace(row, count=row.count - 1), *latents]


def llama_collectives(shape: LlamaShape, parallel: Parallel, recompute: str = "none") -> list[PredictedCollective]:
    """List the collectives among the t ranks in one layer for one microbatch, in 16 bits.

    They are those of the paper's layer (``layer_collectives``), with two exceptions. Latent attention gathers the
    latents, and the part of the key that all heads share, instead of attention's input. Experts under sequence
    parallelism exchange tokens by all-to-alls, among the ranks that share experts, instead of the MLP's collectives.
    Without sequence parallelism every rank has every token: the MLP's all-reduces stay, and an all-reduce of the
    gradient of the routing weights is added. Shared experts have the MLP's collectives as well.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        parallel: how the ranks share the layer; tensor, sequence, context and expert parallelism are read.
        recompute: the name of a mode of recomputation, such as "full".
    """
    rank_shape, t, a = own_context_shape(shape, parallel), parallel.tensor_parallel_size, shape.num_attention_heads
    s, b, h = rank_shape.seq_length, rank_shape.micro_batch_size, rank_shape.hidden_size
    rows = layer_collectives(ModelShape(s, b, h, a, vocab_size=1), Parallel(t, parallel.sequence_parallel), recompute)
    ranks, cut, shared = parallel.expert_ranks, parallel.sequence_parts == t, shape.num_shared_experts
    exchanged = shape.num_experts is not None and ranks > 1
    if exchanged and cut and not shared:
        rows = [replace(each, count=1) for each in rows]
    if rank_shape.latent:
        rows = [each for row in rows for each in _of_latents(row, rank_shape.latent, 2 * s * b) if each.count]
    if not exchanged:
        return rows
    pairs = s * b // parallel.sequence_parts * (shape.experts_per_token or 0)
    if not cut:
        sums = [("forward", OUTPUT), ("backward", INPUT)] if shared else []
        rows += [PredictedCollective("all-reduce", phase, t, 2 * s * b * h, place=place) for phase, place in sums]
        return [*rows, PredictedCollective("all-reduce", "backward", t, FLOAT32 * pairs, place=EXPERT_EXCHANGE)]
    region = Recompute.of(recompute).region
    again, weighed_again = int(region == "layer"), int(region != "none")
    all_to_alls = [
        (2 * h * pairs, {"forward": 2, "recompute": again, "backward": 3}),
        (FLOAT32 * pairs, {"forward": 1, "recompute": weighed_again, "backward": 1}),
    ]
    return rows + [
        PredictedCollective("all-to-all", phase, ranks, size, count, EXPERT_EXCHANGE)
        for size, counts in all_to_alls
        for phase, count in counts.items()
        if count
    ]


def context_collectives(
    shape: LlamaShape,
    parallel: Parallel = Parallel(),
    context_kind: str = "gather",
    recompute: Mode = "none",
    element_size: int = 2,
) -> list[PredictedCollective]:
    """List the collectives among the c context-parallel ranks in one layer for one microbatch; none for c = 1.

    The sum of the weights' gradients over the c ranks is not listed: it runs once an iteration, together with the sum
    over data-parallel ranks.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        parallel: how the ranks share the layer; ``context_parallel_size`` is c.
        context_kind: how the c ranks share a sequence: "gather", "gather-plain" or "ulysses".
        recompute: a mode's name such as "full", a set of tensors' names to drop, or a dict from names to actions.
        element_size: bytes of an activation element.

    Raises: ConfigError if the ranks can't share the layer.
    """
    c, t = parallel.context_parallel_size, parallel.tensor_parallel_size
    rank_shape = own_context_shape(shape, parallel, context_kind)
    if c == 1:
        return []
    dropped = llama_layer_terms(shape, _is_ulysses(parallel, context_kind)).dropped(recompute)
    one_head = element_size * rank_shape.seq_length * rank_shape.micro_batch_size * rank_shape.d
    key = one_head * max(rank_shape.num_key_value_heads // t, 1)
    query = one_head * (rank_shape.num_attention_heads // t)
    rebuilt = _made_again(shape, dropped)
    if context_kind == "ulysses":
        sizes = {"Q": query, "K": key, "V": key, "the result": query}
        return [
            PredictedCollective("all-to-all", phase, c, size)
            for phase in ("forward", "recompute", "backward")
            for what, size in sizes.items()
            if phase != "recompute" or what in rebuilt
        ]
    gathers = {"forward": 2, "backward": 2}
    if context_kind == "gather-plain":
        gathers = {"forward": 2, "recompute": len(rebuilt & {"K", "V"})}
    elif rebuilt & {"attention"}:
        gathers["recompute"] = 2
    return [
        *(
            PredictedCollective("all-gather", phase, c, c * key, count, CONTEXT_EXCHANGE)
            for phase, count in gathers.items()
            if count
        ),
        PredictedCollective("reduce-scatter", "backward", c, c * key, 2, CONTEXT_EXCHANGE),
    ]


def _made_again(shape: LlamaShape, dropped: frozenset[str]) -> set[str]:
    """Return which of the tensors that collectives send are rebuilt in backward, if these terms are dropped.

    Rebuilding one result of a call rebuilds all of them.
    """
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
