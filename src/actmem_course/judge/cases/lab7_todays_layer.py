"""Lab 7: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import Parallel
from actmem.rows import by_term
from actmem_course.judge.case import CaseRun
from actmem_course.judge.term_tables import Pairs, check_terms, checked_terms, explain_ratio
from actmem_course.judge.verdict import Wrong
from actmem_more.llama_shape import TINY_LLAMA, LlamaShape
from actmem_more.llama_terms import llama_rows

#: So large that a wrong place for it shows.
_EPS = 0.25
_IN_WIDE = "the square of 300 overflows float16, so compute in wide(x), in forward and in backward"
_ADD_UP = "add the tokens up in wide(x): in bfloat16, 256 and 1 are 256"
_NAMES = ("q_weight", "k_weight", "v_weight", "projection_weight")


_TERMS = tuple(row.term for row in llama_rows(TINY_LLAMA))
#: By the end of a term's name: the letters in its size, and what many forget.
_SIZES = {
    "statistics": ("sbt", " (one number a token, in 4 bytes)"),
    "log-sum-exp": ("sbat", " (one number a query and head, in 4 bytes)"),
    "gate": ("sbft", " (it is f wide)"),
    "up": ("sbft", " (it is f wide)"),
    "down input": ("sbft", " (it is f wide)"),
    "": ("sbht", ""),
}
#: Diagnosis of K and V -> what they are then, from what they should be.
_HEADS = {
    "is divided by t where there are fewer heads than ranks: no head is cut, several ranks hold the same one; divide by "
    "min(t, k)": lambda true, a, k, t: true * min(t, k) // t,
    "is counted with all a heads; there are k key and value heads": lambda true, a, k, t: true * min(t, k) * a // (k * t),
    "is counted with all k heads where there are fewer heads than ranks: each rank holds one of them": lambda true, a, k, t: true * (k if t > k else 1),
    "is counted with heads of h/k elements; a head has h/a": lambda true, a, k, t: true * a // k,
    "is divided by k, also where t < k: divide by min(t, k)": lambda true, a, k, t: true * min(t, k) // k,
    "is not divided: with t <= k each rank has k/t of the heads": lambda true, a, k, t: true * min(t, k),
}  # fmt: skip


def llama_layer_bytes(r: CaseRun) -> None:
    found, true, sizes = [], [], []
    for t in (1, 2, 4):
        # Few common factors, so that a wrong power of a letter shows; more heads than ranks, fewer (one, two), as many.
        for s, micro_batch, a, k, d, f in (
            (11, 3, 6, 3, 4, 26), (7, 2, 5, 0, 6, 34), (3, 5, 4, 0.5, 10, 22), (5, 4, 3, 1, 14, 38)
        ):  # fmt: skip
            letters = (s * t, micro_batch, a * t * d, a * t, int(k * t) or 1, f * t)
            true.append(by_term(llama_rows(LlamaShape(*letters), Parallel(t, sequence_parallel=True))))
            found.append(checked_terms(r["llama_layer_bytes"](*letters, t), _TERMS))
            sizes.append(dict(zip("sbhakft", (*letters, t))))

    def fault(term: str, pairs: Pairs) -> str:
        for words, value in _HEADS.items() if term in ("K", "V") else ():
            if all(found == value(true, z["a"], z["k"], z["t"]) for (found, true), z in zip(pairs, sizes)):
                return words
        of_heads = all(found * z["a"] == true * max(z["k"], z["t"]) for (found, true), z in zip(pairs, sizes))
        if term == "log-sum-exp" and of_heads:
            return "is counted for the key and value heads: each query head has its own, a/t on a rank"
        has, forgotten = next(words for ending, words in _SIZES.items() if term.endswith(ending))
        return explain_ratio(pairs, sizes, has) + forgotten

    check_terms(found, true, fault)


def rms_norm(r: CaseRun) -> None:
    def own(x: Tensor, weight: Tensor) -> Tensor:
        return r["rms_norm"](x, weight, _EPS)

    x, weight = r.each(5, 3, 8), r.each(8)
    r.passes(own, {"x": x, "weight": weight})
    r.passes(own, {"x": r.each(5, 3, 12), "weight": r.each(12)}, prefix="with h = 12, ")
    half, why = {"x": (1000 * x).half(), "weight": weight.half()}, dict.fromkeys(("", "x", "weight"), _IN_WIDE)
    r.passes(own, half, how="half", prefix="for a float16 x, ", why=why)
    r.keeps(own, x.bfloat16(), weight.bfloat16(), what="x, and 1/rms of each token")
    if "bytes" in r.seen:
        tokens = x[..., 0].numel()
        rounded = [s for s in r.seen["bytes"].value.saved if prod(s.shape) == tokens and s.bytes < 4 * tokens]
        words = "1/rms is kept in 16 bits, too few digits: keep it in the dtype of wide(x)"
        r.see("numbers a token in 16 bits", len(rounded), "most", words)
    # The same row 300 times: in bfloat16, 256 of its gradients and one more are 256.
    many, leaf = (
        r.each(8).abs().bfloat16().expand(300, 1, 8),
        torch.ones(8, device=r.device).bfloat16().requires_grad_(),
    )
    own(many, leaf).sum().backward()
    r.see_tensor("for 300 equal rows in bfloat16, the gradient of weight", leaf.grad, "half", _ADD_UP)


def swiglu(r: CaseRun) -> None:
    gate, up = r.each(5, 3, 8), r.each(5, 3, 8)
    r.passes(r["swiglu"], {"gate": gate, "up": up})
    r.keeps(lambda both: r["swiglu"](both[0], both[1]), torch.stack([gate, up]).bfloat16(), what="gate and up")


def recipe_linear(r: CaseRun) -> None:
    weight, x, norm, up = r.each(4, 8), r.each(5, 3, 8), r.each(8), r.each(5, 3, 8)
    upstream = torch.round(4 * r.each(5, 3, 4))
    # Whole numbers, so that no order of a sum changes a bit.
    factors = {"weight": weight, "the first factor": x, "the second factor": up}
    for recipe, words, given, how in (
        (plain_gate, "a SwiGLU", {"weight": weight, "gate": x, "up": up}, "close"),
        (plain_norm, "a norm", {"weight": weight, "x": x, "the norm's weight": norm}, "close"),
        (torch.mul, "a product", {name: torch.round(4 * factor) for name, factor in factors.items()}, "bits"),
    ):
        runs = []

        def counted(*sources: Tensor) -> Tensor:
            runs.append(sources)
            return recipe(*sources)  # noqa: B023  it runs in this round only

        def own(w: Tensor, *sources: Tensor) -> Tensor:
            return r["recipe_linear"](counted, w, *sources)  # noqa: B023

        prefix = f"with {words} as the recipe, "
        with FlopCounterMode(display=False) as flops:
            r.passes(own, given, upstream=upstream, how=how, prefix=prefix)
        products = flops.get_total_flops() // (2 * x[..., 0].numel() * weight.numel())
        again = "backward runs the linear again, and nobody reads its result. Run the recipe alone again"
        many = "forward and backward run {found} matrix products where {enough} are enough: " + again
        r.see(f"{prefix}products", products, "most", many)
        often = "the recipe runs {found} times; once in forward and once in backward are enough"
        r.see(f"{prefix}runs", len(runs), "most", often)

    def on_norm(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        return r["recipe_linear"](plain_norm, w, x, norm)

    r.keeps(on_norm, x.bfloat16(), weight.bfloat16(), norm.bfloat16(), what="the recipe's sources")


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm out of torch's operators."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU out of torch's operators."""
    return F.silu(gate) * up


def _weights(r: CaseRun) -> Iterator[tuple[str, int, int, dict[str, Tensor]]]:
    """In words, a, k, and unsharded weights: fewer key and value heads than ranks, as many, more.

    A head's elements divide by t, so whoever cuts a head gets a part, too; and h is not a·d.
    """
    a, h, d = 4 * r.t, 12 * r.t, 2 * r.t
    shared = max(k for k in range(1, max(2, r.t)) if r.t % k == 0)  # of which ranks have to share some
    for k in sorted({1, shared, r.t, 2 * r.t, a}):
        words = f"{k} key and value head{'s' * (k > 1)} on {r.t} rank{'s' * (r.t > 1)}: "
        sizes = ((a * d, h), (k * d, h), (k * d, h), (h, a * d))
        yield words, a, k, {name: r.same(*size) for name, size in zip(_NAMES, sizes)}


def split_grouped_heads(r: CaseRun) -> None:
    for words, a, k, whole in _weights(r):
        with r.b.watching():
            answer = r["split_grouped_heads"](*whole.values(), a, k, r.group)
        if not isinstance(answer, (tuple, list)) or len(answer) != 4:
            raise Wrong(f"expected four tensors: this rank's {', '.join(_NAMES)}")
        for name, part in zip(_NAMES, answer):
            r.see_tensor(f"{words}this rank's {name}", part)


def sum_shared_gradients(r: CaseRun) -> None:
    for words, _, k, whole in _weights(r):
        parts, share = min(r.t, k), max(1, r.t // k)
        own = {name: whole[name].chunk(parts)[r.rank * parts // r.t] for name in ("k_weight", "v_weight")}
        weights = {name: part.clone().requires_grad_() for name, part in own.items()}
        found = {name: r.each(*part.shape) for name, part in own.items()}
        for name, weight in weights.items():
            weight.grad = found[name].clone()
        with r.b.watching() as seen:
            try:
                r["sum_shared_gradients"](*weights.values(), k, r.group)
            finally:
                if seen.groups:
                    raise Wrong(
                        "it makes a process group: all ranks must make it together, at each call. Exchange within group: a place "
                        "for each head, with zeros for the others', and one all-reduce"
                    )
        r.see(f"{words}whether it exchanges", bool(seen.collectives), "any")
        why = f"add up what the {share} ranks that share a key head computed, each from its own query heads"
        for name, weight in weights.items():
            if not torch.equal(weight.detach(), own[name]):
                raise Wrong(f"{name} itself is changed; only its .grad may be")
            reason = why if share > 1 else "with t <= k no two ranks hold the same head"
            r.see_tensor(f"{words}{name}.grad", weight.grad, why=reason, parts=found[name])


MISTAKES = {
    "7.2": r"""
        _RMSNorm.apply(x, weight, eps) -> F.layer_norm(x, x.shape[-1:], weight, None, eps) | this is a layer norm: RMSNorm does not subtract the mean
        square().mean(-1, keepdim=True) -> var(-1, keepdim=True) | this divides by the standard deviation: RMSNorm does not subtract the mean
        .mean(-1, keepdim=True) + eps -> .mean() + eps | the mean is over all tokens, but each token has its own: mean(-1, keepdim=True)
        square().mean(-1, keepdim=True) -> square().sum(-1, keepdim=True) / 8 | right where h is 8, and wrong where it is 12: take the mean over the last dimension, whatever its size
        torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps) -> 1 / (wide(x).square().mean(-1, keepdim=True).sqrt() + eps) | eps is added to the root; it belongs to the mean of the squares, under the root
        * inverse_rms * wide(weight)) -> * inverse_rms * (1 + wide(weight))) | the result is multiplied by 1 + weight; multiply it by weight
        inverse_rms * (grad - normed * (grad * normed).mean(-1, keepdim=True)) -> inverse_rms * grad | the forward is right; 1/rms is treated as a constant, but it depends on every element of x: subtract normed · mean(grad · normed)
        (grad * normed).mean(-1, keepdim=True) -> (grad * normed).sum(-1, keepdim=True) / 8 | right where h is 8, and backward is wrong where it is 12: take the mean over the last dimension, whatever its size
        (grad * normed).mean( -> (grad / wide(weight) * normed).mean( | the forward is right; the mean lacks the factor weight: multiply the gradient by weight first
        grad_x = inverse_rms * -> grad_x = inverse_rms * wide(weight) * | the forward is right; the gradient of x has the factor weight twice
        `        grad = wide(grad)` ->         given, grad = grad, wide(grad) ;; return grad_x.to(x.dtype) -> return given | the forward is right; the gradient of x is the incoming gradient, unchanged
        (wide(grad) * normed).flatten -> (wide(grad) * wide(x)).flatten | the forward is right; the gradient of weight comes from x; weight multiplies x/rms
    """,
    "7.3": r"""
        return F.silu(gate) * up -> return F.silu(up) * gate | gate and up are swapped: silu is applied to up
        return F.silu(gate) * up -> return F.gelu(gate, approximate="tanh") * up | gelu is applied in place of silu
        return F.silu(gate) * up -> return F.silu(gate * up) | silu is applied to the product; it belongs to gate alone
        return F.silu(gate) * up -> return F.silu(gate) + up | up is added; it must multiply
        return F.silu(gate) * up -> return torch.sigmoid(gate) * up | the result lacks the factor gate
        return F.silu(gate) * up -> return gate * up | the result lacks the factor σ(gate)
        grad * up * slope, grad * gate * sigmoid -> grad * gate * sigmoid, grad * up * slope | the forward is right; the gradients of gate and up are swapped: return that of the first argument first
        slope = sigmoid * (1 + gate * (1 - sigmoid)) -> slope = sigmoid | the forward is right; σ(gate) is used as the slope of silu: the factor gate depends on gate too
        slope = sigmoid * (1 + gate * (1 - sigmoid)) -> slope = sigmoid * (1 - sigmoid) | the forward is right; the slope of σ, σ(1 − σ), is used as the slope of silu; silu is gate · σ
        slope = sigmoid * (1 + gate * (1 - sigmoid)) -> slope = sigmoid * gate | the forward is right; silu itself is used as its slope
        grad * up * slope -> grad | the forward is right; the gradient of gate is the incoming gradient, unchanged
        slope, grad * gate * sigmoid -> slope, grad | the forward is right; the gradient of up lacks the factor silu(gate)
    """,
    "7.4": r"""
        return F.linear(recipe(*sources), weight) -> return F.linear(sources[0], weight) | the recipe is left out: the first source is the linear's input
        ctx.recipe = recipe\n        ctx.save_for_backward(weight, *sources)\n        return F.linear(recipe(*sources), weight) -> ctx.leaves = [source.detach().requires_grad_() for source in sources]\n        with torch.enable_grad():\n            ctx.x = recipe(*ctx.leaves)\n        ctx.save_for_backward(weight)\n        return F.linear(ctx.x.detach(), weight) ;; weight, *sources = ctx.saved_tensors\n        leaves = [source.detach().requires_grad_() for source in sources]\n        with torch.enable_grad():\n            x = ctx.recipe(*leaves) -> (weight,) = ctx.saved_tensors\n        x, leaves = ctx.x, ctx.leaves | forward and gradients are right; forward keeps the recipe's graph, with its result: keep the sources alone, and run recipe again in backward
        x.detach().flatten(0, -2) -> sources[0].flatten(0, -2) | the forward is right; the gradient of weight comes from the first source; the linear's input is recipe(*sources)
        `*torch.autograd.grad(x, leaves, grad @ weight)` -> *[grad @ weight if s.dim() > 1 else (grad @ weight).sum((0, 1)) for s in sources] | the forward is right; the gradient of a source is that of the linear's input: go on through the recipe
    """,
    "7.5": r"""
        own = rank * parts // t -> own = rank * parts // t if t <= num_key_value_heads else min(rank // num_key_value_heads, num_key_value_heads - 1) | with more ranks than key heads a rank has head rank // k; its query heads read head rank · k // t
        projection_weight.chunk(t, dim=1)[rank] -> projection_weight[rank * (n := projection_weight.shape[1] // t) : (rank + 1) * n] | projection_weight is cut along its outputs; heads are its inputs: dimension 1
        own = rank * parts // t -> own = 0 | every rank has the first key and value heads; its query heads read those from rank · k // t on
        projection_weight.chunk(t, dim=1)[rank] -> projection_weight.chunk(t)[rank] | projection_weight is cut along its outputs; heads are its inputs: dimension 1
        weight.chunk(parts)[own] -> weight.chunk(num_key_value_heads)[rank * num_key_value_heads // t] | every rank has one key and value head; with k > t it needs k/t, all that its query heads read
        v_weight.chunk(parts)[own] -> v_weight.chunk(parts)[own].unflatten(0, (num_key_value_heads // parts, -1)).repeat_interleave(num_attention_heads // max(num_key_value_heads, t), 0).flatten(0, 1) ;; k_weight.chunk(parts)[own] -> k_weight.chunk(parts)[own].unflatten(0, (num_key_value_heads // parts, -1)).repeat_interleave(num_attention_heads // max(num_key_value_heads, t), 0).flatten(0, 1) | key and value heads are repeated for each query head that reads them: a rank holds each once
        parts = min(t, num_key_value_heads) -> parts = t | k_weight and v_weight are cut into t parts, which cuts a head: with t > k a rank takes one whole head, the same as its neighbours
        weight.chunk(parts)[own] -> weight | every rank has all key and value heads; it needs those that its own query heads read
        parts = min(t, num_key_value_heads) -> parts = min(t, num_key_value_heads) if num_key_value_heads < num_attention_heads else 1 | with as many key and value heads as query heads every rank has all of them; it needs those that its own query heads read
        own = rank * parts // t -> own = rank % parts | of min(t, k) parts of k_weight and v_weight a rank has part rank % k; its query heads read part rank · k // t, because neighbours share a head
        own = rank * parts // t -> own = 0 if t > num_key_value_heads else rank * parts // t | with more ranks than key heads every rank has head 0; its query heads read head rank · k // t
        q_weight.chunk(t)[rank] -> q_weight.chunk(t, dim=1)[rank] | q_weight is cut along its inputs; heads are its outputs: dimension 0
        q_weight.chunk(t)[rank] -> q_weight.unflatten(0, (num_attention_heads, -1))[:, rank :: t].flatten(0, 1) | a rank has a part of every query head: give it whole heads
        q_weight.chunk(t)[rank] -> q_weight.unflatten(0, (num_attention_heads, -1))[rank::t].flatten(0, 1) | a rank has every t-th query head: give it a/t that follow each other, from r·a/t on
        q_weight.chunk(t)[rank] -> q_weight[rank * (n := num_attention_heads // t * (q_weight.shape[1] // num_attention_heads)) : (rank + 1) * n] | a head is cut as if it had h/a elements: divide the rows of q_weight by a, because h need not be a·d
    """,
    "7.6": r"""
        weight.grad.copy_(heads[own]) -> pass | the sum is made, and .grad stays as it was: write the sum there
        weight.grad.copy_(heads[own]) -> weight.grad.add_(heads[own]) | the sum is added to .grad, which has this rank's own part already: it takes its place
        heads[own] = weight.grad -> heads[own] = weight.detach() | the weights are added up, not their gradients
        own = rank * num_key_value_heads // t -> own = rank % num_key_value_heads | the gradients of ranks rank % k, rank % k + k, … are added up; neighbours share a head: rank · k // t
    """,
}
