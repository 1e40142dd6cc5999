"""Lab 3: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from actmem.ledger.comms import Collective
from actmem_course.judge.case import CaseRun
from actmem_course.judge.exchanged import G_BAR_OPERATOR, G_OPERATOR, size_of
from actmem_course.judge.solutions.lab3_sequence_parallel import gathering_linear as our_linear
from actmem_course.judge.verdict import Wrong
from actmem_course.pieces import LayerWeights, random_weights

#: Parameters that meet s/t tokens on each rank, so that each rank finds a part of their gradient.
PARTIAL = ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias")


def g(r: CaseRun) -> None:
    r.operator(G_OPERATOR, r.each(r.t, r.t, 5))  # t divides both, so that whoever cuts by mistake can


def g_bar(r: CaseRun) -> None:
    r.operator(G_BAR_OPERATOR, r.each(2 * r.t, r.t, 2 * r.t))  # t divides all, so that whoever cuts by mistake can


def gathering_linear(r: CaseRun) -> None:
    _linear(r, r["gathering_linear"], r.t)


def shard_keeping_linear(r: CaseRun) -> None:
    given = _linear(r, r["shard_keeping_linear"])
    more = "save the shard and gather it again in backward"
    r.keeps(
        lambda x, w, c: r["shard_keeping_linear"](x, w, c, r.group),
        *given,
        what="x, this rank's tokens",
        more=more,
        itself=True,
    )


def _linear(r: CaseRun, function, tokens: int = 2) -> list[Tensor]:
    given = {"x": r.each(tokens, 3, 6), "weight": r.each(5, 6), "bias": r.each(5)}
    # Whoever gathers again in 3.3 has already found what 3.5 is after.
    r.passes(function, given, r.group, again=[Collective("all-gather", r.t * size_of(given["x"]))])
    return list(given.values())


class Scaling:
    """In place of dropouts: a factor for each call, none of them 1/t, which a sum over the ranks could make up for."""

    def __init__(self) -> None:
        #: How often block was called, and the tokens that it was given last.
        self.blocks, self.tokens = 0, 0

    def core(self, weights: Tensor) -> Tensor:
        return weights * 0.6

    def block(self, x: Tensor) -> Tensor:
        self.blocks, self.tokens = self.blocks + 1, x.shape[0]
        return x * (0.7, 0.3)[(self.blocks - 1) % 2]


def layer(r: CaseRun) -> None:
    heads, s, calls = 3 * r.t, 3 * r.t, []  # a/2 isn't t

    def linear(x, weight, bias, group):  # gathering_linear's own names: a learner may call it with keywords
        if 1 < r.t and x.shape[0] == s:
            raise Wrong("linear is given all tokens: it gathers them itself, so give it this rank's, without g")
        calls.append(weight)
        return our_linear(x, weight, bias, group)

    linear.__qualname__ = "linear"  # what Python says of wrong arguments begins with it

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        scaling = Scaling()
        try:
            return r["layer"](x, LayerWeights(heads, *parameters), scaling, linear, r.group)
        except RuntimeError:
            if r.t > 1 and scaling.tokens == s:  # too many for the addition, of which torch tells the sizes only
                what = "attention" if scaling.blocks == 1 else "the MLP"
                raise Wrong(
                    f"the result of {what} has all tokens, but x has this rank's: end each block with g_bar, which sums over the ranks and keeps this rank's tokens"
                ) from None
            raise

    own = _drawn(4 * heads, heads, 30, r.device).part(r.rank, r.t).named()
    why = {"": "end each block with g_bar, which keeps this rank's tokens"}
    r.passes(function, {"x": r.shard(s, 2, 4 * heads), **own}, total=PARTIAL, why=why)
    often = ("never called", "called once")[len(calls)] if len(calls) < 2 else f"called {len(calls)} times"
    words = f"linear is {often}: use it for QKV and for h → 4h, so that the lab can replace it"
    r.see("calls of linear", abs(len(calls) - 2), "most", words)


@cache
def _drawn(hidden_size: int, heads: int, seed: int, device: str) -> LayerWeights:
    """Drawn once: hundreds of edits run on copies of its parts, and the draw takes a quarter of such a run."""
    return random_weights(hidden_size, heads, seed=seed, device=device)


def sum_partial_gradients(r: CaseRun) -> None:
    w = _drawn(6 * r.t, 2 * r.t, 40 + r.rank, r.device).part(r.rank, r.t)
    w = w.map(lambda name, x: x.clone().requires_grad_())
    for x in w.named().values():
        x.grad = 3 * x.detach()  # any numbers
    before, given = w.map(lambda name, x: x.detach().clone()).named(), replace(w)
    with r.b.watching() as seen:
        r["sum_partial_gradients"](given, r.group)
    changed = [name for name, x in w.named().items() if not torch.equal(x.detach(), before[name])]
    if changed:
        raise Wrong(f"the parameters themselves are changed ({', '.join(changed)}); only their .grad may be")
    for name, x in w.named().items():
        r.see_tensor(f"{name}.grad", x.grad, parts=3 * before[name], why=_REPLICATED if name in PARTIAL else _CUT)
    # On the wire a ring sends (t − 1)/t of a tensor, for an all-reduce twice.  To gather all parts and add them up is as
    # cheap with two ranks and dearer with more, but a right way to the numbers.
    sent = sum(c.payload_bytes * (2 if c.kind == "all-reduce" else 1) for c in seen.collectives)
    enough = 2 * sum(size_of(before[name]) for name in PARTIAL)
    words = "each rank sends {found:,} B where {enough:,} B are enough: all-reduce the partial gradients only"
    right_way = sent <= max(2, r.t) * enough // 2
    r.see("bytes sent", (r.t - 1) * (enough if right_way else sent) // r.t, "most", words)


_CUT = "this parameter is cut among the ranks and saw all tokens, so leave its gradient as it is"
_REPLICATED = "this parameter is replicated, and each rank's copy saw only s/t tokens"


def dropout_generators(r: CaseRun) -> None:
    try:
        r["dropout_generators"](0, False, "xpu", r.group)
    except RuntimeError:  # as it should: this machine has none
        pass
    else:
        raise Wrong("device is not used: create the generators with torch.Generator(device)")
    for parallel in (False, True):
        draws: dict[str, list[float]] = {}
        # A seed that is multiplied makes the same of 0 everywhere.
        for words, seed in (("", 1234), (" the second time", 1234), (" with another seed", 4321), (" with seed 0", 0)):
            torch.manual_seed(99)
            before = torch.get_rng_state()
            with r.b.watching():
                made = r["dropout_generators"](seed, parallel, r.device, r.group)
            if not torch.equal(before, torch.get_rng_state()):
                raise Wrong(
                    "torch's default generator is changed (torch.manual_seed, or a draw without generator=): create two generators"
                )
            if not isinstance(made, (tuple, list)) or [isinstance(x, torch.Generator) for x in made] != [True, True]:
                raise Wrong("expected two torch.Generators: for Dropouts.core and for Dropouts.block")
            # One generator for both is fine where both are this rank's own: the draws then follow each other.
            if made[0] is made[1] and not parallel and r.t > 1:
                raise Wrong(
                    "without sequence_parallel, one generator serves core and block: core's draws differ by rank, block's must not"
                )
            for name, generator in zip(("core", "block"), made):
                draws[f"{name}{words}"] = torch.rand(64, generator=generator, device=r.device).tolist()
        r.see(f"with{'' if parallel else 'out'} sequence_parallel", draws, "pattern", partial(_draws_fault, parallel))


_DRAWN = {
    2: "ranks draw the same for core: each holds different heads, so every rank must drop differently there",
    3: "ranks draw the same for block: each holds different tokens, and would repeat one pattern of drops",
    4: "ranks draw different numbers for block: each holds the whole [s, b, h], and the replicas would drift apart",
    5: "core and block draw the same numbers on some ranks: give the two generators seeds that are never equal",
}


def _draws_fault(parallel: bool, one: tuple[str, int], other: tuple[str, int], same: bool) -> tuple[float, str]:
    """What it means that two draws are the same, or are not; the gravest first."""
    kinds, seeds = zip(*(name.partition(" ")[::2] for name, _ in (one, other)))
    when = f"with{'' if parallel else 'out'} sequence_parallel{' and with seed 0' * (seeds[0] == seeds[1] == 'with seed 0')}, "
    late = len({one[1], other[1]}) > 1 and 0.5 * (seeds[0] != "")
    if not same and one[1] == other[1]:
        return 0, "the same seed gives other numbers the second time: seed each with manual_seed, from seed alone"
    if same and "with another seed" in seeds and seeds[0] != seeds[1] and one[1] == other[1]:
        return (
            1,
            "another seed gives the same numbers: make each generator's seed from seed, on rank 0 too, where a product with the rank is 0",
        )
    grave = 4 if not same else 5 if kinds[0] != kinds[1] else 2 if kinds[0] == "core" else 3
    return grave + late, when + _DRAWN[grave]


_AFTER = "after the sum over the ranks, once (before the sum it would count t times)"
#: Where something belongs, for edits that nobody has stated.
PLACES = {
    "gelu": "between the two linears",
    "the bias": _AFTER,
    "dropouts.block": "after the bias, before x is added",
    "layer_norm": "inside the residual branch, before g. What is added at the end is x as it was before the norm",
    "the addition of x": "at the block's end, once",
}
MISTAKES = {
    "3.3": r"""
        g(x, group), weight, bias -> g(x, group), weight, dist.get_world_size(group) * bias | bias is multiplied by t: nothing is summed after it, so add it once
        return F.linear(g(x, group), weight, bias) -> return F.linear(x, weight, bias) | the result has this rank's tokens only, not all s: call g on x first, so that this rank's weight meets all tokens
        g(x, group), weight, bias -> g(x, group), weight | bias is missing: it belongs after the linear, once
        F.linear(g(x, group), weight, bias) -> F.linear(g(x, group), weight, bias) + bias | bias comes twice: it belongs after the linear, once
    """,
    "3.4": r"""
        `    y = linear(layer_norm(x, w.norm1_weight, w.norm1_bias)` ->     x = layer_norm(x, w.norm1_weight, w.norm1_bias)\n    y = linear(x | the first layer norm comes before the residual branch: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        `    y = gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias)` ->     x = layer_norm(x, w.norm2_weight, w.norm2_bias)\n    y = gelu(linear(x | the second layer norm comes before the residual branch: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        `    y = linear(layer_norm(x, w.norm1_weight, w.norm1_bias)` ->     x = layer_norm(x, w.norm1_weight, w.norm1_bias)\n    y = linear(x ;; `    y = gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias)` ->     x = layer_norm(x, w.norm2_weight, w.norm2_bias)\n    y = gelu(linear(x | every layer norm comes before the residual branch: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm1_weight, w.norm1_bias) -> x ;; `    x = x + dropouts.block(y)` ->     x = layer_norm(x + dropouts.block(y), w.norm1_weight, w.norm1_bias) | the first layer norm comes after the addition of x: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm2_weight, w.norm2_bias) -> x ;; return x + dropouts.block(y) -> return layer_norm(x + dropouts.block(y), w.norm2_weight, w.norm2_bias) | the second layer norm comes after the addition of x: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm1_weight, w.norm1_bias) -> x ;; `    x = x + dropouts.block(y)` ->     x = layer_norm(x + dropouts.block(y), w.norm1_weight, w.norm1_bias) ;; layer_norm(x, w.norm2_weight, w.norm2_bias) -> x ;; return x + dropouts.block(y) -> return layer_norm(x + dropouts.block(y), w.norm2_weight, w.norm2_bias) | every layer norm comes after the addition of x: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm1_weight, w.norm1_bias) -> x ;; `    x = x + dropouts.block(y)` ->     x = x + layer_norm(dropouts.block(y), w.norm1_weight, w.norm1_bias) | the first layer norm comes after the block, before the addition of x: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm2_weight, w.norm2_bias) -> x ;; return x + dropouts.block(y) -> return x + layer_norm(dropouts.block(y), w.norm2_weight, w.norm2_bias) | the second layer norm comes after the block, before the addition of x: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm1_weight, w.norm1_bias) -> x ;; `    x = x + dropouts.block(y)` ->     x = x + layer_norm(dropouts.block(y), w.norm1_weight, w.norm1_bias) ;; layer_norm(x, w.norm2_weight, w.norm2_bias) -> x ;; return x + dropouts.block(y) -> return x + layer_norm(dropouts.block(y), w.norm2_weight, w.norm2_bias) | every layer norm comes after the block, before the addition of x: it belongs inside the residual branch, before g. What is added at the end is x as it was before the norm
        layer_norm(x, w.norm1_weight, w.norm1_bias) -> x | the first layer norm is missing: it belongs inside the residual branch, before g
        layer_norm(x, w.norm2_weight, w.norm2_bias) -> x | the second layer norm is missing: it belongs inside the residual branch, before g
        gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)) -> linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group) | the gelu is missing: it belongs between the two linears
        y = gelu( -> y = F.relu( | relu is used instead of gelu
        y = gelu( -> y = F.silu( | silu is used instead of gelu
        y = gelu( -> y = F.gelu( | F.gelu is called without approximate="tanh": use gelu of actmem_course.pieces, which has the tanh formula
        y = gelu(linear -> y = gelu(gelu)(linear ;; gelu(gelu)(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)) -> gelu(gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group))) | the gelu comes twice: it belongs between the two linears
        gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)) -> linear(gelu(layer_norm(x, w.norm2_weight, w.norm2_bias)), w.up_weight, w.up_bias, group) | gelu comes before the MLP's first linear: it belongs between the two linears
        gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)) -> gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, 0 * w.up_bias, group)) + w.up_bias | up_bias comes after the gelu: it belongs right after the product
        w.qkv_bias -> 0 * w.qkv_bias | qkv_bias is missing: it belongs right after the product
        w.up_bias -> 0 * w.up_bias | up_bias is missing: it belongs right after the product
        ` + w.projection_bias` ->  | projection_bias is missing: it belongs after the sum over the ranks, once (before the sum it would count t times)
        ` + w.down_bias` ->  | down_bias is missing: it belongs after the sum over the ranks, once (before the sum it would count t times)
        ` + w.projection_bias` ->  ;; ` + w.down_bias` ->  | projection_bias and down_bias are missing: they belong after the sum over the ranks, once
        w.projection_weight), group) + w.projection_bias -> w.projection_weight, w.projection_bias), group) | projection_bias comes before attention's g_bar: it belongs after the sum over the ranks, once (before the sum it would count t times)
        w.down_weight), group) + w.down_bias -> w.down_weight, w.down_bias), group) | down_bias comes before the MLP's g_bar: it belongs after the sum over the ranks, once (before the sum it would count t times)
        w.projection_weight), group) + w.projection_bias -> w.projection_weight, w.projection_bias), group) ;; w.down_weight), group) + w.down_bias -> w.down_weight, w.down_bias), group) | projection_bias and down_bias come before g_bar: they belong after the sum over the ranks, once (before the sum they would count t times)
        dropouts.block(y) -> y ;; g_bar(F.linear(context, w.projection_weight), group) -> g_bar(dropouts.block(F.linear(context, w.projection_weight)), group) ;; g_bar(F.linear(y, w.down_weight), group) -> g_bar(dropouts.block(F.linear(y, w.down_weight)), group) | dropouts.block comes before the bias, in both blocks: it drops elements of what is added to x, so it belongs after g_bar and the bias
        w.norm1_weight, w.norm1_bias -> w.norm0_weight, w.norm0_bias ;; norm2 -> norm1 ;; norm0 -> norm2 | norm1's and norm2's weight and bias are swapped: norm1's come first
        norm2 -> norm1 | norm1's weight and bias are also used where norm2's belong
        norm1_ -> norm2_ | norm2's weight and bias are also used where norm1's belong
        `    x = x + dropouts.block(y)` ->     x = dropouts.block(y) | the addition of x to attention's result is missing: it belongs at the block's end, once
        return x + dropouts.block(y) -> return dropouts.block(y) | the addition of x to the MLP's result is missing: it belongs at the block's end, once
        `    x = x + dropouts.block(y)` ->     first, x = x, x + dropouts.block(y) ;; return x + -> return first + | the MLP's result is added to the layer's input: add it to x after attention's result is added
        `    x = x + dropouts.block(y)` ->     first, x = x, x + dropouts.block(y) ;; layer_norm(x, w.norm2 -> layer_norm(first, w.norm2 | the second layer norm is applied to the layer's input; apply it to x after attention's result is added
        x + dropouts.block(y) -> x + y | dropouts.block is missing, in all places: it belongs after the bias, before x is added
        `    x = x + dropouts.block(y)` ->     dropouts.block(y)\n    x = x + y | attention's dropouts.block is missing: it belongs after the bias, before x is added
        return x + dropouts.block(y) -> return x + y | the MLP's dropouts.block is missing: it belongs after the bias, before x is added
        x + dropouts.block(y) -> dropouts.block(x + y) | dropouts.block comes after the addition of x, in all places: it belongs after the bias, before x is added
        `    x = x + dropouts.block(y)` ->     x = dropouts.block(x + y) | attention's dropouts.block comes after the addition of x to attention's result: it belongs after the bias, before x is added
        return x + dropouts.block(y) -> return dropouts.block(x + y) | the MLP's dropouts.block comes after the addition of x to the MLP's result: it belongs after the bias, before x is added
        y = g_bar(F.linear(context, w.projection_weight), group) -> y = g_bar(dropouts.block(F.linear(context, w.projection_weight)), group) ;; `    x = x + dropouts.block(y)` ->     x = x + y | attention's dropouts.block comes before projection_bias: it belongs after the bias, before x is added
        y = g_bar(F.linear(y, w.down_weight), group) -> y = g_bar(dropouts.block(F.linear(y, w.down_weight)), group) ;; return x + dropouts.block(y) -> return x + y | the MLP's dropouts.block comes before down_bias: it belongs after the bias, before x is added
        `    x = x + dropouts.block(y)` ->     x = x + dropouts.core(y) | dropouts.core is applied to attention's result: it is for the attention weights; use dropouts.block here
        return x + dropouts.block(y) -> return x + dropouts.core(y) | dropouts.core is applied to the MLP's result: it is for the attention weights; use dropouts.block here
        x + dropouts.block(y) -> x + dropouts.core(y) | dropouts.core is applied to both results: it is for the attention weights; use dropouts.block there
        , x.shape[1]) -> , x.shape[0]) | merge_heads is given the number of tokens: its second argument is the number of sequences, x.shape[1]
        dropouts.core) -> dropouts.block) | dropouts.block is used for the attention weights: it is for what is added to x; use dropouts.core here
        dropouts.core -> dropouts.kore ;; dropouts.block -> dropouts.core ;; dropouts.kore -> dropouts.block | dropouts.core and dropouts.block are swapped: core is for the attention weights
        , dropouts.core) -> ) | dropouts.core is not used: it is core_attention's fourth argument
        , dropouts.core) -> ) ;; x + dropouts.block(y) -> x + y | neither of the dropouts is used
        w.num_attention_heads // dist.get_world_size(group) -> w.num_attention_heads | a rank's part is split into a heads; it holds a/t: divide num_attention_heads by the number of ranks
        core_attention(*split_heads(y, heads_here) -> core_attention(*[split_heads(y, heads_here)[i] for i in (1, 0, 2)] | Q and K are swapped: split_heads gives Q, K, V, and core_attention takes them in this order
        core_attention(*split_heads(y, heads_here) -> core_attention(*[split_heads(y, heads_here)[i] for i in (0, 2, 1)] | K and V are swapped: split_heads gives Q, K, V, and core_attention takes them in this order
        core_attention(*split_heads(y, heads_here) -> core_attention(*[split_heads(y, heads_here)[i] for i in (2, 1, 0)] | Q and V are swapped: split_heads gives Q, K, V, and core_attention takes them in this order
        core_attention(*split_heads(y, heads_here), dropouts.core) -> dropouts.core(F.scaled_dot_product_attention(*split_heads(y, heads_here))) | there is no causal mask, so a token attends to later ones: use core_attention
        g_bar(F.linear(context, w.projection_weight), group) -> F.linear(context, w.projection_weight).chunk(dist.get_world_size(group))[dist.get_rank(group)] | attention's result is cut without a sum over the ranks: g_bar's forward must reduce-scatter once, with SUM
        g_bar(F.linear(y, w.down_weight), group) -> F.linear(y, w.down_weight).chunk(dist.get_world_size(group))[dist.get_rank(group)] | the MLP's result is cut without a sum over the ranks: g_bar's forward must reduce-scatter once, with SUM
        g_bar( -> (lambda x, group: x.chunk(dist.get_world_size(group))[dist.get_rank(group)])( ;; def (lambda x, group: x.chunk(dist.get_world_size(group))[dist.get_rank(group)])( -> def g_bar( | both results are cut without a sum over the ranks: g_bar's forward must reduce-scatter once, with SUM
    """,
    "3.5": r"""
        _scattered(grad @ weight, ctx.group) -> _scattered(grad, ctx.group) @ weight | the forward is right; the gradient is summed over the ranks before it is multiplied by weight, but each rank has its own weight: multiply first, then reduce-scatter
        full = _gathered(x, ctx.group)\n -> full = _gathered(x, ctx.group)\n        grad = _gathered(grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], ctx.group)\n | the gradients of weight and bias come from gathered gradients: gather nothing, because a rank has the gradients of its features for all tokens already
        _scattered(grad @ weight, ctx.group) -> _scattered(_gathered(grad, ctx.group)[: len(grad)] @ weight, ctx.group) | the forward is right; every rank uses rank 0's gradient: gather nothing, because a rank has the gradients of its features for all tokens already
        grad.flatten(0, 1).t() @ full.flatten(0, 1) -> grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].flatten(0, 1).t() @ x.flatten(0, 1) | the gradient of weight comes from this rank's tokens only, and the weight meets all tokens, so x must be gathered again
        grad.sum((0, 1)) -> grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].sum((0, 1)) | the gradient of bias comes from this rank's tokens only, and the bias is added to all tokens
        _scattered(grad @ weight, ctx.group) -> (grad @ weight).chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)] | the forward is right; the gradient of x is cut without a sum over the ranks: g's backward must reduce-scatter once, with SUM
        _scattered(grad @ weight, ctx.group) -> _scattered(grad @ weight, ctx.group) / dist.get_world_size(ctx.group) | the forward is right; the gradient of x is a mean over the ranks, not a sum: reduce-scatter once, with SUM
        full = _gathered(x, ctx.group)\n -> full = torch.cat(_gathered(x, ctx.group).chunk(dist.get_world_size(ctx.group))[::-1])\n | the gradient of weight is computed from the ranks' parts of x joined in reverse order, the last rank first; join them along dimension 0 in the ranks' order
        full = _gathered(x, ctx.group)\n -> full = torch.cat([x] * dist.get_world_size(ctx.group))\n | the gradient of weight is computed from this rank's own part of x, t times; it should be computed from the ranks' parts joined along dimension 0
        F.linear(_gathered(x, group), weight, bias) -> F.linear(_gathered(x, group), weight) | bias is missing: it belongs after the linear, once
    """,
    "3.7": r"""
        return core, block -> return block, core | without sequence_parallel, the two generators are swapped: core comes first, then block
    """,
    "3.6": "".join(
        f'        "{name}" -> "{name}", "{name}" | {name}.grad is t times the sum of the ranks\' parts: it is summed twice\n'
        for name in PARTIAL
    )
    + r"""
        ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias") -> w.named() | .grad is the sum of the ranks' parts for every parameter. Those that are cut among the ranks saw all tokens, so each rank's gradient is complete: leave it as it is
        "projection_bias", "norm2_weight", "norm2_bias", "down_bias") -> "norm2_weight", "norm2_bias") | .grad is this rank's own part: projection_bias, down_bias. They are replicated, and each rank's copy saw only s/t tokens, so the gradient is the sum of the ranks' parts
        "projection_bias", "norm2_weight", "norm2_bias", "down_bias") -> "projection_bias", "norm2_weight", "norm2_bias", "down_bias", "qkv_bias", "up_bias") | .grad is the sum of the ranks' parts: qkv_bias, up_bias. They are cut among the ranks and saw all tokens, so each rank's gradient is complete: leave it as it is
        ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias") -> ("projection_bias", "down_bias") | .grad is this rank's own part: the layer norms' weights and biases. They are replicated, and each rank's copy saw only s/t tokens, so the gradient is the sum of the ranks' parts
        .grad, group=group) -> .grad, group=group)\n        getattr(w, name).grad /= dist.get_world_size(group) | .grad is 1/t of the sum of the ranks' parts: each rank's part comes from other tokens, so add the parts up and average nothing
        .grad, group=group) -> .grad.clone(), group=group) | no .grad has changed: an all-reduce works in place, so give it the .grad itself, or copy the result back
        all_reduce(getattr(w, name).grad, group=group) -> broadcast(getattr(w, name).grad, dist.get_global_rank(group, 0), group=group) | every rank has rank 0's part: each saw different tokens, so the parts must be summed (all-reduce), not copied
        all_reduce(getattr(w, name).grad, group=group) -> reduce(getattr(w, name).grad, dist.get_global_rank(group, 0), group=group) | only rank 0 has the sum; the others update the same parameters and need it too: all-reduce, not reduce
        w, name).grad, group=group) -> w, name).grad, dist.ReduceOp.MAX, group=group) | .grad is the largest of the ranks' parts (MAX): each saw other tokens, so the gradient is the sum of the ranks' parts
        .grad, group=group) -> .grad, group=group)\n        dist.all_reduce(getattr(w, name).grad, group=group) | .grad is t times the sum of the ranks' parts: one all-reduce makes the sum, and a second adds up t copies of it
    """,
}
