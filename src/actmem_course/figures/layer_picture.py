"""The one picture of the course: a transformer layer, with a row for each tensor that it saves for backward.

The width of a box is the tensor's bytes, its colour the tensor's kind (``style.FILLS``). Each rank has a column: a
sharded tensor is narrow in every column, a replicated one has its full width in every column. Recomputed tensors are
hatched, offloaded ones are in a column of their own. A collective is a row of arrows between the ranks, with the bytes
that each rank sends.

``layer_picture`` draws the paper's layer and today's; ``block_picture`` draws blocks that a chapter has changed;
``pipeline_picture`` draws the microbatches in flight. Every number comes from actmem's formulas.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

from actmem.config import ConfigError, ModelShape, Parallel, check_choice
from actmem.formulas.activations import layer_rows
from actmem.formulas.communication import PredictedCollective
from actmem.recipes import PAPER_LAYER, LayerTerms, Mode
from actmem.rows import Row
from actmem_course.figures.marks import Drawing
from actmem_course.figures.sketch import Block, Sketch, Transfer
from actmem_course.figures.terms import formula_of, llama_formula, term_of
from actmem_course.figures.units import size_text
from actmem_more.llama_shape import LlamaShape, llama_layer_terms
from actmem_more.llama_terms import FLOAT32, context_collectives, llama_rows

Shape = ModelShape | LlamaShape
#: Which collectives are drawn: those of a pass, or those that recomputation repeats in backward.
PHASES = ("", "forward", "recompute", "backward")
#: How c ranks share a sequence in the picture: "gather" and "ulysses" as in ``llama_shape.CONTEXT_KINDS``; "ring" sends
#: K and V from rank to rank around a ring.
CONTEXT_KINDS = ("gather", "ring", "ulysses")
COPIED, ALONG_S = "a copy on every rank", "sharded along s"


def layer_picture(
    shape: Shape,
    parallel: Parallel = Parallel(),
    recompute: Mode = "none",
    *,
    collectives: str = "",
    stored: int | None = None,
    in_memory: Collection[str] | None = None,
    not_saved: Collection[str] = (),
    keeps_gathered: bool = False,
    context_kind: str = "gather",
    routed_tokens: Sequence[int] = (),
    title: str = "",
) -> Drawing:
    """Draw the layer with everything that it saves for backward on each rank.

    Args:
        shape: The paper's layer, or one of today's: Llama's, with experts, with latent attention.
        parallel: How ranks share the layer: t tensor-parallel ranks, with or without sequence parallelism, or c
            context-parallel ranks.
        recompute: What backward recomputes: a mode such as "selective", a set of terms (names of saved tensors), or a
            dict with an action, such as "recompute" or "offload", for each term.
        collectives: "forward" and "backward" draw the collectives of that pass, "recompute" those that recomputation
            repeats in backward, "" none. In backward the arrows point upwards.
        stored: How many tensors the forward pass has stored so far; None for all. The last of them is framed.
        in_memory: The terms that are in memory at one moment; None for those that the forward pass saves. Recomputed
            tensors among them are framed.
        not_saved: Terms that aren't saved, because no gradient needs them: their weights are frozen.
        keeps_gathered: Whether sequence parallelism saves the gathered inputs, as its plain form does, and not shards.
        context_kind: How context-parallel ranks share the sequence: "gather", "ring" or "ulysses".
        routed_tokens: For experts: how many (token, expert) pairs each rank has; if empty, all ranks have equally many.
        title: A title; "" for the finding that the picture makes by itself.

    Returns:
        A drawing whose boxes are as wide as their bytes.

    Raises:
        ConfigError: The ranks can't share the layer, a set can't be recomputed, or another argument is out of range.
    """
    check_choice("collectives", collectives, PHASES)
    check_choice("context_kind", context_kind, CONTEXT_KINDS)
    blocks = layer_blocks(shape, parallel, recompute, keeps_gathered, context_kind, routed_tokens)
    moves = transfers(shape, parallel, collectives, recompute, context_kind) if collectives else []
    moves = [move for move in moves if not (move.gathers_again and keeps_gathered)]
    if len(set(routed_tokens)) > 1:
        moves = [_as_routed(move, routed_tokens) if move.kind == "all-to-all" else move for move in moves]
    blocks = [_with_gathered_again(block, moves) for block in blocks]
    blocks = [
        replace(block, action="not saved", is_present=False) if block.row.term in not_saved else block
        for block in blocks
    ]
    saved = blocks
    if stored is not None:
        if not 1 <= stored <= len(blocks):
            raise ConfigError("stored", f"must be from 1 to {len(blocks)}, got {stored}")
        in_memory = [block.row.term for block in blocks[:stored] if block.is_present]
    if in_memory is not None:
        blocks = [replace(block, is_present=block.row.term in in_memory) for block in blocks]
    ranks = max(parallel.tensor_parallel_size, parallel.context_parallel_size)
    now = None if stored is None else blocks[stored - 1]
    finding = title or (_finding(blocks, ranks) if in_memory is None else _now_finding(blocks, saved, now))
    letters = f"s={shape.seq_length}, b={shape.micro_batch_size}, h={shape.hidden_size}, a={shape.num_attention_heads}"
    sketch = Sketch(blocks, ranks, collectives == "backward")
    sketch.draw(moves, _regions(blocks), now.row.term if now else "", marks_again=in_memory is not None)
    return sketch.drawing(finding, f"One layer at {letters}, {ranks} ranks: {sketch.told(moves)}.")


def block_picture(blocks: Sequence[Block], title: str) -> Drawing:
    """Draw any list of saved tensors on one rank, such as those of ``layer_blocks`` after a chapter has changed some.

    Args:
        blocks: The tensors, one for each row of the picture.
        title: The picture's title: the finding.
    """
    sketch = Sketch(blocks)
    sketch.draw((), _regions(blocks))
    return sketch.drawing(title, f"One layer: {sketch.told()}.")


def layer_blocks(
    shape: Shape,
    parallel: Parallel = Parallel(),
    recompute: Mode = "none",
    keeps_gathered: bool = False,
    context_kind: str = "gather",
    routed_tokens: Sequence[int] = (),
) -> list[Block]:
    """List the tensors that a layer has saved at the end of the forward pass, for ``block_picture``.

    Args:
        shape: The paper's layer, or one of today's.
        parallel: How ranks share the layer: t tensor-parallel ranks, or c context-parallel ranks.
        recompute: What backward recomputes: a mode such as "selective", a set of terms, or an action for each term.
        keeps_gathered: Whether sequence parallelism saves the gathered inputs and not shards.
        context_kind: How context-parallel ranks share the sequence: "gather", "ring" or "ulysses".
        routed_tokens: For experts: how many (token, expert) pairs each rank has; if empty, all ranks have equally many.

    Raises:
        ConfigError: The ranks can't share the layer, a set can't be recomputed, or t and c are both above 1: a picture
            has one kind of rank.
    """
    t, c = parallel.tensor_parallel_size, parallel.context_parallel_size
    ranks = max(t, c)
    if c > 1 and (t > 1 or isinstance(shape, ModelShape)):
        raise ConfigError(
            "context_parallel_size", f"must be 1 beside tensor-parallel ranks and in the paper's layer, got {c}"
        )
    if routed_tokens:
        check_choice("number of routed_tokens", len(routed_tokens), [ranks])
    # A ring saves what "gather" saves: K and V go around in place of the all-gather.
    saved_as = "ulysses" if context_kind == "ulysses" else "gather"
    terms, unsharded_rows, rank_rows, kept_rows = _rows(shape, parallel, recompute, saved_as)
    actions = {**dict.fromkeys(terms.dropped(recompute), "recompute"), **terms.stored(recompute)}
    unsharded, kept_bytes = {row.term: row for row in unsharded_rows}, {row.term: row.bytes for row in kept_rows}
    unsharded_bytes = {row.term: row.bytes for row in unsharded_rows}
    unsharded_bytes["attention output before all-to-all"] = unsharded_bytes.get("attention projection input", 0)
    gathered_terms = _edges(shape, parallel)[0] if keeps_gathered and parallel.sequence_parallel else ()
    blocks = []
    for row in rank_rows:
        if row.term in gathered_terms:
            row = replace(row, bytes=unsharded_bytes[row.term], split_by=1)
            kept_bytes[row.term] = row.bytes
        action = actions.get(row.term, "keep" if row.term in kept_bytes else "recompute")
        is_present, held = action in ("keep", "compress"), kept_bytes.get(row.term, row.bytes)
        block = Block(row, unsharded_bytes[row.term], held=held, action=action, is_present=is_present)
        by_rank = _by_rank(row, shape, parallel, routed_tokens)
        split = _split(block, shape, parallel, context_kind) if ranks > 1 else ""
        formula = _formula(row, shape, parallel)
        if formula and len(set(by_rank)) > 1:  # no rank has the even share that the formula of one rank says
            formula = f"{_formula(unsharded[row.term], shape, Parallel())} in all"
        blocks.append(replace(block, by_rank=by_rank, split=split, formula=formula))
    return blocks


def _rows(
    shape: Shape, parallel: Parallel, recompute: Mode, context_kind: str
) -> tuple[LayerTerms, list[Row], list[Row], list[Row]]:
    """Return the layer's terms, and its rows in three forms.

    Returns: the terms; the rows without parallelism; the rows as one rank saves them; and these with recomputation.
    """
    if isinstance(shape, ModelShape):
        shards = layer_rows(shape, parallel)
        return PAPER_LAYER, layer_rows(shape), shards, layer_rows(shape, parallel, recompute)
    terms = llama_layer_terms(shape, context_kind == "ulysses" and parallel.context_parallel_size > 1)
    shards = llama_rows(shape, parallel, context_kind=context_kind)
    held = llama_rows(shape, parallel, recompute, context_kind=context_kind)
    small = [row for row in shards if row.term in (*terms.statistics, *terms.by_products)]
    alike = {row.term for row in small if row.split_by == small[0].split_by}
    return terms, _together(llama_rows(shape), alike), _together(shards, alike), _together(held, alike)


def _together(rows: Sequence[Row], alike: Collection[str]) -> list[Row]:
    """Join the statistics that the ranks share in the same way to one row, at the end: each is too small to see."""
    small, others = ([row for row in rows if (row.term in alike) == is_small] for is_small in (True, False))
    return [*others, replace(small[0], term="statistics", bytes=sum(row.bytes for row in small))] if small else others


def _formula(row: Row, shape: Shape, parallel: Parallel) -> str:
    if isinstance(shape, ModelShape):
        return formula_of(row, shape)
    is_context = parallel.context_parallel_size > 1
    fewer = row.split_by < parallel.tensor_parallel_size  # as many ranks as there are key and value heads
    return llama_formula(row, shape, "c" if is_context else "k" if fewer else "t")


def _split(block: Block, shape: Shape, parallel: Parallel, context_kind: str) -> str:
    """Return in words how the ranks share a tensor."""
    term, t, shared_by = block.row.term, parallel.tensor_parallel_size, term_of(block.row).shared_by
    if block.row.bytes == block.whole:
        return COPIED
    if parallel.context_parallel_size > 1:
        by_head = context_kind == "ulysses" and shared_by == "heads" and term != "attention projection input"
        return "sharded by heads" if by_head else ALONG_S
    if shared_by == "heads":
        return "sharded by heads" if block.row.split_by == t else f"each head on {t // block.row.split_by} ranks"
    if _is_of_experts(block.row, shape):
        return "whole experts on each rank"
    if shared_by == "width":
        return "sharded along the MLP's width"
    return "" if term == "statistics" else ALONG_S


def _is_of_experts(row: Row, shape: Shape) -> bool:
    """Return whether the ranks share a tensor by whole experts, so that it grows with the tokens that these get."""
    by = term_of(row).shared_by
    is_routed = by == "experts" or (by == "width" and not row.term.startswith("shared"))
    return is_routed and isinstance(shape, LlamaShape) and bool(shape.num_experts)


def _by_rank(of: Row, shape: Shape, parallel: Parallel, routed_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of an expert's tensor on each rank, by the pairs that it takes; empty for other tensors."""
    if isinstance(shape, ModelShape) or not _is_of_experts(of, shape):
        return ()
    rows = [row for tokens in routed_tokens for row in llama_rows(shape, parallel, routed_tokens=tokens)]
    return tuple(row.bytes for row in rows if row.term == of.term)


def _with_gathered_again(block: Block, moves: Sequence[Transfer]) -> Block:
    """Add what backward gathers for a moment: the rest of a tensor of which a shard is saved. K and V come together."""
    again = {move.after for move in moves if move.gathers_again}
    is_gathered = block.row.term in again or (block.row.term == "K" and "V" in again)
    return replace(block, gathered=block.whole - block.row.bytes) if is_gathered else block


def _regions(blocks: Sequence[Block]) -> dict[str, str]:
    """Return how the ranks share the blocks, by the first term of each run of blocks shared in the same way."""
    return {next(run).row.term: split for split, run in groupby(blocks, lambda block: block.split)}


def transfers(
    shape: Shape, parallel: Parallel, phase: str, recompute: Mode = "none", context_kind: str = "gather"
) -> list[Transfer]:
    """List the collectives of one pass in 16 bits, each with the tensor below which it is drawn.

    Args:
        shape: The layer's sizes.
        parallel: How ranks share the layer.
        phase: "forward", "backward", or "recompute" for those that recomputation repeats in backward.
        recompute: What backward recomputes: a mode such as "selective", a set of terms, or an action for each term.
        context_kind: How context-parallel ranks share the sequence: "gather", "ring" or "ulysses".

    Raises:
        ConfigError: actmem has no formula for this layer's collectives.
    """
    if isinstance(shape, LlamaShape):
        if shape.latent or shape.shared_ffn_size:
            raise ConfigError("collectives", "no formula counts those of latent attention and of shared experts")
        if phase == "recompute":
            raise ConfigError("collectives", "the picture repeats those of the paper's layer only")
        if parallel.context_parallel_size > 1:
            return _among_context_ranks(shape, parallel, phase, context_kind)
    t = parallel.tensor_parallel_size
    if t == 1:
        return []
    starts, ends = _edges(shape, parallel)
    payload = 2 * shape.seq_length * shape.micro_batch_size * shape.hidden_size

    def after(kind: str, terms: Collection[str], again: str = "") -> list[Transfer]:
        gathers_again = bool(again) and phase == "backward"
        return [
            Transfer([PredictedCollective(kind, phase, t, payload)], term, kind + again, kind, gathers_again)
            for term in terms
        ]

    if phase == "recompute":
        matmuls = PAPER_LAYER.recomputed_matmuls(recompute)
        starts = [term for term, matmul in zip(starts, ("QKV projection", "h→4h")) if matmul in matmuls]
        ends = [term for term, matmul in zip(ends, ("attention projection", "4h→h")) if matmul in matmuls]
        if not parallel.sequence_parallel:
            return after("all-reduce", ends, " again")
        return after("all-gather", starts, " again") + after("reduce-scatter", ends, " again")
    experts = _of_experts(shape, parallel, phase) if isinstance(shape, LlamaShape) and shape.num_experts else []
    if not parallel.sequence_parallel:
        return after("all-reduce", ends if phase == "forward" else starts) + experts
    if phase == "forward":
        return after("all-gather", starts) + after("reduce-scatter", ends) + experts
    # Read from the bottom up: X is gathered again before its gradient is reduced.
    return after("reduce-scatter", starts) + after("all-gather", starts, " again") + after("all-gather", ends) + experts


def _edges(shape: Shape, parallel: Parallel) -> tuple[Sequence[str], Sequence[str]]:
    """Return the inputs of the column-parallel matmuls (where f and g are) and of the row-parallel ones (before f̄ and
    ḡ).
    """
    if isinstance(shape, ModelShape):
        return ("QKV projection input", "h→4h input"), ("attention projection input", "4h→h input")
    starts, ends = ("QKV projection input", "gate and up input"), ("attention projection input", "down input")
    if not shape.num_experts:
        return starts, ends
    # Under sequence parallelism the experts' all-to-alls are in place of the MLP's collectives.
    return (starts[:1], ends[:1]) if parallel.sequence_parallel else ((starts[0], "router input"), ends)


def _of_experts(shape: LlamaShape, parallel: Parallel, phase: str) -> list[Transfer]:
    """List what brings tokens and their weights to the ranks of their experts, and back."""
    t, taken = parallel.tensor_parallel_size, shape.experts_per_token or 0
    pairs = shape.seq_length * shape.micro_batch_size * taken // parallel.sequence_parts
    if not parallel.sequence_parallel:
        sums = [PredictedCollective("all-reduce", phase, t, FLOAT32 * pairs)]
        return [Transfer(sums, "routing weights", "all-reduce of weights", "all-reduce")] if phase == "backward" else []
    rows, weights = (
        PredictedCollective("all-to-all", phase, t, size * pairs) for size in (2 * shape.hidden_size, FLOAT32)
    )
    if phase == "forward":
        sent = [(weights, "dispatch order", "weights"), (rows, "dispatched weights", "dispatch")]
        sent += [(rows, "down input", "combine")]
    else:
        sent = [(weights, "dispatch order", "weights' gradients"), (rows, "dispatched weights", "gradients back")]
        sent += [(rows, "dispatched weights", "dispatch again"), (rows, "down input", "gradients to experts")]
    return [Transfer([each], term, f"{what}: all-to-all", "all-to-all") for each, term, what in sent]


def _as_routed(move: Transfer, routed_tokens: Sequence[int]) -> Transfer:
    """Give an all-to-all of the forward pass the bytes that the busiest rank sends.

    On the way to the experts a rank sends all that it has for experts of other ranks; on the way back it sends all that
    its experts took, without its own tokens.
    """
    (each,), even = move.collectives, Fraction(sum(routed_tokens), len(routed_tokens))
    times = max(routed_tokens) / even - 1 if move.after == "down input" else 1
    return replace(move, most=int(times * each.payload_bytes))


def _among_context_ranks(shape: LlamaShape, parallel: Parallel, phase: str, context_kind: str) -> list[Transfer]:
    """List what brings K and V to all ranks, at once or around a ring, or tokens to heads and back."""
    kind = "gather" if context_kind == "ring" else context_kind
    collectives = [each for each in context_collectives(shape, parallel, kind) if each.phase == phase]
    if kind == "ulysses":
        *to_heads, back = collectives
        return [
            Transfer(to_heads, "QKV projection input", "all-to-all: Q, K, V", "all-to-all"),
            Transfer([back], "attention output before all-to-all", "all-to-all: the result", "all-to-all"),
        ]
    name, look = ("ring of sends", "ring") if context_kind == "ring" else ("all-gather", "all-gather")
    gathers, *sums = collectives
    if phase == "forward":
        return [Transfer([gathers], "V", f"{name}, K and V", look)]
    gathered = Transfer([gathers], "V", f"{name}, K and V again", look, gathers_again=True)
    return [Transfer(sums, "V", "reduce-scatter of gradients", "reduce-scatter"), gathered]


def _finding(blocks: Sequence[Block], ranks: int) -> str:
    """Return what the picture shows, in two lines at most."""
    held = sum(block.on_device for block in blocks)
    who = f"Each of {ranks} ranks" if ranks > 1 else "One layer"
    actions = (("recompute", "recomputed"), ("offload", "on the host"), ("not saved", "not saved"))
    gone = [
        f"{size_text(size)} {name}"
        for action, name in actions
        if (size := sum(block.row.bytes for block in blocks if block.action == action))
    ]
    where = "on the GPU" if any(block.action == "offload" for block in blocks) else "for backward"
    if gone:
        return f"{who} saves {size_text(held)} {where};<br>{', '.join(gone)}"
    if any(block.by_rank for block in blocks):
        return f"The fullest of {ranks} ranks saves {size_text(held)} for backward"
    saved = f"{who} saves {size_text(held)} for backward"
    if ranks > 1:
        if gathered := [block.gathered for block in blocks if block.gathered]:
            return f"{saved};<br>{len(gathered)} × {size_text(max(gathered))} gathered again, each for a moment (grey)"
        copied = sum(block.on_device for block in blocks if block.row.split_by < ranks)
        more = (
            f"{size_text(copied)} of it is a copy of what another rank saves" if copied else "every tensor is sharded"
        )
        return f"{saved};<br>{more}"
    most = max(block.on_device for block in blocks)
    largest = [block.row.term for block in blocks if block.on_device == most]
    where = " and ".join(largest) if len(largest) < 3 else f"{len(largest)} tensors"
    each = " each" if len(largest) > 1 else ""
    return f"{saved};<br>most in {where}: {most / held:.0%}{each}"


def _now_finding(blocks: Sequence[Block], saved: Sequence[Block], now: Block | None) -> str:
    """Return a text that says how many bytes are in memory at a moment.

    Args:
        blocks: The blocks at this moment.
        saved: The same blocks after the forward pass.
        now: The block that was stored last; None if the moment isn't one of the forward pass's steps.
    """
    held, of_all = (size_text(sum(block.on_device for block in each)) for each in (blocks, saved))
    if now is None:
        return f"In memory now: {held};<br>after the forward pass: {of_all}"
    size = size_text(now.on_device) if now.on_device else "not saved, recomputed in backward"
    return f"{now.row.term}: {size};<br>saved so far {held} of {of_all}"
