"""Lab 9: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.case import CaseRun, text_of
from actmem_course.judge.exchanged import size_of
from actmem_course.judge.kept import Largest
from actmem_course.judge.verdict import Wrong

_S, _B = 25, 3
_TOKENS = _S * _B
#: Another right answer may keep other numbers of a token: 32 bytes of them, where ours keeps one sum.
_SPARE = (32 - 4) * _TOKENS
#: It doesn't divide the tokens.
_CHUNK = 24
_V, _H = 64, 24
_OVERFLOWS = "exp of a logit above 709 is infinite in float64, and so is the log of a softmax that is 0: log p is the logit less logsumexp"
_SLOPE_ROUNDED = {
    "logits": "compute p, and subtract 1 at the target, in wide(logits), and round at the end: if p is near 1, 16 bits lose p − 1"
}
_LIVE = "in {when} {{found:,}} B live at once, where {{enough:,}} are enough: free a chunk before you make the next. Most of it: {most}"
_ONE_IS_NONE = "the other's gradient is None after set_materialize_grads(False): take None as 0, or leave that call out"
_ROUNDED = "compute it in wide(logits): 16 bits hold 3 digits"


def _tokens(r: CaseRun, v: int, sizes: tuple[int, int] = (_S, _B), same: bool = False) -> Tensor:
    """Ids from 0 to v − 1, first and last among them, and one three times."""
    ids = ((r.same if same else r.each)(*sizes) * 1e6).long().remainder(v)
    ids.view(-1)[:6] = torch.tensor([0, v - 1, 2, 2, 2, v // 2], device=ids.device)
    return ids


def _sure(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits of 16 bits that give each target a probability near 1."""
    return (logits / 3).scatter(-1, targets.unsqueeze(-1), 8).bfloat16()


def cross_entropy(r: CaseRun) -> None:
    logits, targets = 3 * r.each(_S, _B, _V), _tokens(r, _V)

    def own(x: Tensor) -> Tensor:
        return r["cross_entropy"](x, targets)

    r.passes(own, {"logits": logits})
    across = r.each(_B, _S).t()  # not contiguous, as what a transposition gives
    r.passes(own, {"logits": 300 * logits}, upstream=across, prefix="for logits of a thousand, ", why={"": _OVERFLOWS})
    half, sure = (20 * logits).bfloat16(), _sure(logits, targets)
    r.see_tensor("for bfloat16 logits, the loss", own(half.clone()), "near", _ROUNDED)
    r.passes(own, {"logits": sure}, how="half", prefix="for bfloat16 logits, ", why=_SLOPE_ROUNDED)
    r.keeps(own, half, what="the logits in 16 bits, and a few numbers a token", spare=_SPARE, others=[targets])


def linear_cross_entropy(r: CaseRun) -> None:
    _in_chunks(r, r["linear_cross_entropy"], 1)


def parallel_linear_cross_entropy(r: CaseRun) -> None:
    def own(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        return r["parallel_linear_cross_entropy"](x, weight, targets, chunk, r.group)

    _in_chunks(r, own, r.t)


def _in_chunks(r: CaseRun, function: Callable[..., Tensor], ranks: int) -> None:
    """x and targets are the same on every rank, weight is each rank's own part of the vocabulary of all ``ranks``."""
    x, weight, targets = r.same(_S, _B, _H), r.each(_V, _H), _tokens(r, ranks * _V, same=True)
    # Of each rank the first and the last id, where an id that is off by one goes to another.
    ends = _V * torch.arange(min(ranks, 16), device=r.device)
    targets.view(-1)[6 : 6 + 2 * len(ends)] = torch.cat((ends, ends + _V - 1))
    upstream = r.same(_B, _S).t()
    for chunk, scale, prefix in ((_CHUNK, 1, ""), (2 * _TOKENS, 300, "for logits of a thousand, in one chunk, ")):
        passes = r.passes(
            lambda x, w: function(x, w, targets, chunk),  # noqa: B023
            {"x": scale * x, "weight": weight},
            upstream=upstream,
            prefix=prefix,
            exchanges=False,
            why={"": _OVERFLOWS} if scale > 1 else None,
        )
        for when, seen, enough in zip(("forward", "backward"), passes, (3 * r.t * size_of(upstream), size_of(x))):
            sent = sum(collective.payload_bytes for collective in seen.collectives)
            own_words = "a few numbers a token, since each rank makes the logits of its own words"
            what = own_words if when == "forward" else "x's gradient, each token's once"
            said = f"{when} exchanges {{found:,}} B ({text_of(seen.collectives)}) where {{enough:,}} are enough: {what}"
            r.see(f"{prefix}bytes sent in {when}", max(sent, enough) if r.t > 1 else 0, "sent", said)

    def in_chunks(x: Tensor, w: Tensor) -> Tensor:
        return function(x, w, targets, _CHUNK)

    given = {"x": x, "weight": weight}
    r.passes(in_chunks, given, upstream=upstream, prefix="where x needs no gradient, ", exchanges=False, still=("x",))
    _many_chunks(r, function, ranks)
    half, words = x.bfloat16(), "x, and a few numbers a token"

    r.keeps(in_chunks, half, weight.bfloat16(), what=words, spare=_SPARE, others=[targets])
    r.see_tensor("for a bfloat16 x, the loss", in_chunks(half, weight.bfloat16()), "near", _ROUNDED)


def _many_chunks(r: CaseRun, function: Callable[..., Tensor], ranks: int) -> None:
    """What is made, and the sum over chunks alike, the first and last of 512 times the others: in bfloat16, 512 and 1 are 512."""
    if not r.b.group_name:  # what is made depends on no group
        _costs_of_chunks(r, function, ranks)
    # One word a coordinate, so that logits are weights: no product rounds them.  The targets' probabilities are near 1.
    rows, ids = torch.eye(3, _H, device=r.device).expand(40, 3, _H), torch.tensor([1, 2, 3], device=r.device)
    vocabulary = r.each(_V, _H)
    vocabulary[ids, ids - 1] = 8.0
    ends = torch.ones(40, 3, device=r.device)
    ends[0] = ends[-1] = 512
    r.passes(
        lambda x, w: function(x, w, ids.expand(40, 3), 3),
        {"x": rows.bfloat16(), "weight": vocabulary.bfloat16()},
        upstream=ends,
        how="half",
        prefix="in 40 chunks of a bfloat16 x, ",
        why={
            "": _ROUNDED,
            "weight": "add up the chunks in wide(weight)",
            "x": "compute p, and subtract 1 at the target, in wide(logits), and keep their logsumexp in 32 bits",
        },
        exchanges=False,
    )


def _costs_of_chunks(r: CaseRun, function: Callable[..., Tensor], ranks: int) -> None:
    x, weight, targets, chunk = r.same(300, 3, 2), r.each(512, 2), _tokens(r, ranks * 512, (300, 3), same=True), 26
    with FlopCounterMode(display=False) as flops:
        made = r.makes(lambda x, w: function(x, w, targets, chunk), {"x": x, "weight": weight}, r.same(300, 3))
    largest = max(chunk * 512, weight.numel(), x.numel())
    enough = 8 * (4 * chunk * 512 + 3 * weight.numel() + 3 * x.numel() + 10 * targets.numel())
    for when, one in made.items():
        at_once = one.elements // 512
        positions = ", in tokens, not in positions of all sequences" * (at_once == 3 * chunk)
        words = f"{when} has the logits of {at_once} tokens at once, where a chunk has {chunk}{positions}. It makes {one.what}: {{found:,}} "
        words += "elements, where the logits of a chunk, x and weight have {enough:,} at most. Use up a chunk's, and go on to the next"
        r.see(f"the largest tensor of {when}", max(largest, one.elements), "most", words)
        r.see(f"the peak of {when}", max(enough, one.peak), "most", _LIVE.format(when=when, most=one.most()))
    many = "forward and backward run {found} products of s·b·v·h where {enough} are enough: one in forward, three in backward"
    r.see("products", -(-flops.get_total_flops() // (2 * targets.numel() * weight.numel())), "most", many)


def log_probs_and_entropy(r: CaseRun) -> None:
    logits, tokens = 3 * r.each(_S, _B, _V), _tokens(r, _V)

    def own(x: Tensor) -> Tensor:
        answer = r["log_probs_and_entropy"](x, tokens, _CHUNK)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2 or not all(isinstance(y, Tensor) for y in answer):
            raise Wrong("expected two tensors: the log-probabilities of the tokens, and the entropies")
        for name, y in zip(("log-probabilities have", "entropies have"), answer):
            if y.shape != tokens.shape:
                raise Wrong(f"the {name} shape {list(y.shape)}; expected {list(tokens.shape)}")
        return torch.stack(list(answer), -1)

    r.passes(own, {"logits": logits})
    r.passes(own, {"logits": 300 * logits}, prefix="for logits of a thousand, ", why={"": _OVERFLOWS})
    one = torch.stack([torch.zeros_like(tokens), torch.ones_like(tokens)], -1).double()
    r.passes(own, {"logits": logits}, upstream=one, prefix="for the entropy alone, ")
    half = logits.bfloat16()
    r.see_tensor("for bfloat16 logits, what comes back", own(half.clone()), "near", _ROUNDED)
    r.passes(own, {"logits": half}, how="half", prefix="for bfloat16 logits, ", why=_SLOPE_ROUNDED)
    # In 16 bits a probability near 1 is 1, and log p and −H of 64 words alike are the same.
    given = {"log-probabilities": _sure(logits, tokens), "entropies": (logits / 60).bfloat16()}
    for k, (what, rounded) in enumerate(given.items()):

        def alone(x: Tensor, chunk: int = _CHUNK) -> Tensor:
            return r["log_probs_and_entropy"](x, tokens, chunk)[k]  # noqa: B023

        prefix = f"if the {what} alone are used, "
        try:
            r.passes(alone, {"logits": logits}, prefix=prefix)
        except (AttributeError, TypeError) as error:
            raise Wrong(f"{prefix}{_ONE_IS_NONE} ({error})") from None
        prefix += "and logits are bfloat16, "
        why = {"logits": "compute it in wide(logits), and keep a token's numbers in 32 bits"} if k else _SLOPE_ROUNDED
        r.passes(lambda x: alone(x, 1), {"logits": rounded}, how="half", prefix=prefix, why=why)  # noqa: B023
    long, ids, chunk = 3 * r.each(100, 3, 512).bfloat16(), _tokens(r, 512, (100, 3)), 7
    both = r.makes(
        lambda x: torch.stack(list(r["log_probs_and_entropy"](x, ids, chunk))), {"logits": long}, how="half", above=2
    )
    for times, (when, made) in enumerate(both.items(), 1):
        words = f"{when} makes {made.what}: {{found:,}} elements of more than 16 bits, where ``chunk`` tokens have {{enough:,}}"
        r.see(f"the largest wide tensor of {when}", max(chunk * 512, made.elements), "most", words)
        enough = times * size_of(long) + 6 * 4 * chunk * 512 + 80 * ids.numel()
        r.see(f"the peak of {when}", max(enough, made.peak), "most", _LIVE.format(when=when, most=made.most()))
    r.keeps(
        own, half, what="the logits in 16 bits, and a few numbers a token", spare=_SPARE - 4 * _TOKENS, others=[tokens]
    )


def embedding(r: CaseRun) -> None:
    v, h = 100, 8
    ids, before = _tokens(r, v), r.each(v, h)
    for dtype, main_dtype, how, prefix in (
        (torch.float64, torch.float64, "close", ""),
        (torch.bfloat16, torch.float32, "near", "for a bfloat16 weight, "),
    ):
        weight = r.each(v, h).to(dtype).requires_grad_()
        main, upstream = before.to(main_dtype, copy=True), r.each(_B, _S, h).transpose(0, 1).to(dtype)
        rows = r["embedding"](ids, weight, main)
        r.see_tensor(f"{prefix}the result", rows, how)
        if not rows.requires_grad:
            raise Wrong("the result has no graph, so backward never comes: make it in a torch.autograd.Function")
        if not torch.equal(main, before.to(main_dtype)):
            raise Wrong("forward writes to main_grad; only backward adds to it")
        words = "a tensor of {found:,} elements is made, and the rows that were looked up have {enough:,}: add them to main_grad where they belong"
        if getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise Wrong(
                "a hook on weight waits for its gradient, [v, h]: add the rows in backward of a torch.autograd.Function"
            )
        with Largest(weight, main, upstream) as made:
            rows.backward(upstream)
        had = "weight has a .grad, as large as itself: add to main_grad, and return None for weight"
        r.see(f"{prefix}gradients of weight", int(weight.grad is not None), "most", had)
        r.see(f"{prefix}the largest tensor made", max(rows.numel(), made.elements), "most", words)
        why = "add wide(gradient) of each token to the row of its id, and leave the other rows as they are"
        r.see_tensor(f"{prefix}main_grad", main, how, why)
        for rows in [r["embedding"](ids, weight, main) for _ in range(2)]:
            rows.backward(upstream)
        r.see_tensor(f"{prefix}main_grad after two more microbatches, both forwards first,", main, how, why)
    words = "nothing beside ids"
    r.keeps(
        lambda x, w: r["embedding"](ids, w, before) + x, r.each(_S, _B, h), weight, what=words, others=[ids, before]
    )


MISTAKES = {
    "9.1": r"""
        return normaliser - target -> return target - normaliser | the result is the log-probability of the target; the loss is its negative
        return normaliser - target -> return normaliser | the target's logit is missing: subtract it
        normaliser = wide(logits).logsumexp(-1)\n        target -> normaliser = wide(logits).exp().sum(-1).log()\n        target | for logits of a thousand, exp overflows: subtract the largest first, or use logsumexp
        return normaliser - target -> return (normaliser - target).mean() | the result is the mean over all tokens; expected one loss a token
        slope.new_full((*targets.shape, 1), -1)) -> slope.new_full((*targets.shape, 1), 0)) | the forward is right; the gradient of logits is that of the softmax alone: subtract 1 at the target
        slope.new_full((*targets.shape, 1), -1)) -> slope.new_full((*targets.shape, 1), 1)) | the forward is right; the gradient adds 1 at the target: subtract it
        slope = (wide(logits) - normaliser.unsqueeze(-1)).exp() -> slope = torch.zeros_like(wide(logits)) | the forward is right; the gradient of logits is that of the target's logit alone: none comes through the sum of the exponentials
        (slope * grad.unsqueeze(-1)).to(logits.dtype), None -> slope.to(logits.dtype), None | the forward is right; the gradient of logits ignores the incoming gradient: multiply by it
        (slope * grad.unsqueeze(-1)).to(logits.dtype), None -> (slope * grad.unsqueeze(-1)).to(logits.dtype) / grad.numel(), None | the forward is right; the gradient of logits is that of a mean: each token's loss is its own
        slope.scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1)) -> slope[..., targets.flatten()] -= 1 | the forward is right; every token's gradient subtracts 1 at all tokens' targets: subtract it at its own
        slope.scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))\n        return (slope * grad.unsqueeze(-1)).to -> slope = slope * grad.unsqueeze(-1)\n        slope.scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))\n        return slope.to | the forward is right; the 1 at the target is not multiplied by the incoming gradient: subtract it before
        ctx.save_for_backward(logits, targets, normaliser) -> ctx.save_for_backward(logits, targets, normaliser.to(logits.dtype)) | right in float64; the logsumexp is rounded to 16 bits, kept or in backward, so that each probability is off by percents: leave it in 32
        (slope * grad.unsqueeze(-1)).to(logits.dtype), None -> (slope * grad.mean()).to(logits.dtype), None | the forward is right; each token's gradient is multiplied by the mean of the incoming ones: multiply by its own
        (slope * grad.unsqueeze(-1)).to(logits.dtype), None -> (slope * grad.t().reshape(grad.shape).unsqueeze(-1)).to(logits.dtype), None | the forward is right; the incoming gradient's s and b are swapped
    """,
    "9.2": r"""
        return _LinearCrossEntropy.apply(x, weight, targets, chunk) -> return cross_entropy(F.linear(x, weight), targets) | the logits of all tokens are made at once, and kept: make those of ``chunk`` tokens at a time, and again in backward
        return _LinearCrossEntropy.apply(x, weight, targets, chunk) -> parts = zip(x.flatten(0, 1).split(chunk), targets.flatten().split(chunk))\n    return torch.cat([cross_entropy(F.linear(rows, weight), ids) for rows, ids in parts]).view(targets.shape) | forward goes chunk by chunk, and autograd keeps every chunk's logits: make them again in backward, in a torch.autograd.Function
        logits = wide(F.linear(rows, weight))\n            normalisers.append(logits.logsumexp(-1))\n            losses -> logits = wide(F.linear(rows, weight))\n            normalisers.append(logits.exp().sum(-1).log())\n            losses | for logits of a thousand, exp overflows: subtract the largest first, or use logsumexp
        losses.append(normalisers[-1] - logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)) -> losses.append(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalisers[-1]) | the result is the log-probability of the target; the loss is its negative
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1 -> pass | the forward is right; the gradients are those of the softmax alone: subtract 1 at the target
        grad_weight += slope.t() @ rows\n        return torch.cat(grads_x).view(x.shape), grad_weight.to(weight.dtype), None, None\n -> grad_weight = slope.t() @ rows\n        return torch.cat(grads_x).view(x.shape), grad_weight.to(weight.dtype), None, None\n | the forward is right; the gradient of weight is the last chunk's alone: add up those of all chunks
        slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) -> slope = slope.to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) | the forward is right; the gradients ignore the incoming gradient: multiply each token's by it
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1 -> slope.zero_()[torch.arange(len(ids), device=ids.device), ids] -= 1 | the forward is right; the gradients are those of the target's logit alone: none comes through the sum of the exponentials
        grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) -> grads_x.append(slope @ weight)\n            grad_weight += (slope / upstream.unsqueeze(-1) * grad.mean()).t() @ rows\n        return torch.cat(grads_x) | the forward is right; the gradient of weight has the mean of the incoming gradients in place of each token's: forward can't know them, so make it in backward
        return torch.cat(losses).view(targets.shape) -> return torch.cat([part.mean().expand_as(part) for part in losses]).view(targets.shape) | each token has the mean loss of its chunk; expected its own
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1 -> slope[torch.arange(len(ids), device=ids.device), ids] += 1 | the forward is right; the gradients add 1 at the target: subtract it
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * upstream.unsqueeze(-1)).to -> slope = slope * upstream.unsqueeze(-1)\n            slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = slope.to | the forward is right; the 1 at the target is not multiplied by the incoming gradient: subtract it before
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * upstream.unsqueeze(-1)) -> slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * grad.flatten()[0]) | the forward is right; every token has the first one's incoming gradient: multiply by its own
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * upstream.unsqueeze(-1)) -> slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * grad.mean()) | the forward is right; each token's gradient is multiplied by the mean of the incoming ones: multiply by its own
        losses = [], []\n -> losses = [], []\n        x = x.transpose(0, 1)\n | rows of x and ids are flattened in different orders: in both, s comes before b
        targets.flatten().split(chunk)):\n            logits = wide -> targets.t().flatten().split(chunk)):\n            logits = wide | rows of x and ids are flattened in different orders: in both, s comes before b
        wide(F.linear(rows, weight)) -> F.linear(wide(rows), wide(weight)) | the product runs in 32 bits: F.linear(x, weight) gives logits in the dtype of x; widen those
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * upstream.unsqueeze(-1)) -> slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n            slope = (slope * grad.flatten()[: len(ids)].unsqueeze(-1)) | the forward is right; every chunk has the first tokens' incoming gradients: each token has its own
        slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) -> slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += (slope / upstream.unsqueeze(-1)).t() @ rows\n        return torch.cat(grads_x) | the forward is right; the gradient of weight ignores the incoming gradient: multiply each token's by it
        slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) -> slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)\n            grads_x.append(slope / upstream.unsqueeze(-1) @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) | the forward is right; the gradient of x ignores the incoming gradient: multiply each token's by it
    """,
    "9.3": r"""
        dist.all_reduce(grad_x, group=ctx.group) ->  | the forward is right; the gradient of x is this rank's own part, that of its words: add up the ranks' parts
        return grad_x, grad_weight.to(weight.dtype) -> dist.all_reduce(grad_weight, group=ctx.group)\n        return grad_x, grad_weight.to(weight.dtype) | the forward is right; the gradient of weight is the sum over the ranks, but each rank's rows are its own
        (ids.unsqueeze(-1) == own_rows).int() -> 0 | the forward is right; the gradients are those of the softmax alone: subtract 1 at the target, on the rank that holds it
        normaliser = sums[0].log() + largest -> normaliser = part | this rank's logits alone are normalised: the sum of the exponentials is over all ranks
        normaliser = sums[0].log() + largest -> normaliser = sums[0].log() | the largest logit is subtracted and not added back: add it to the logarithm
        torch.cat(picked) * mine.flatten() -> torch.cat(picked) | ranks that don't hold the target add another logit instead: they must add 0
        own_ids = targets - dist.get_rank(group) * len(weight) -> own_ids = targets | the ids are not shifted by the first id of this rank
        largest = part.clone()\n        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) -> largest = torch.zeros_like(part) | for logits of a thousand, exp overflows: subtract the largest of all ranks first
        largest = part.clone()\n        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) -> largest = part.clone() | each rank subtracts its own largest logit before the sum: all must subtract the same
        (ids.unsqueeze(-1) == own_rows).int() -> (ids.unsqueeze(-1).clamp(own_rows[0], own_rows[-1]) == own_rows).int() | the forward is right; ranks that don't hold the target subtract 1 at another word: they must subtract 0
        (ids.unsqueeze(-1) == own_rows).int() -> (ids.where((ids >= own_rows[0]) & (ids <= own_rows[-1]), own_rows[0]).unsqueeze(-1) == own_rows).int() | the forward is right; ranks that don't hold the target subtract 1 at their first word: they must subtract 0
        ctx.save_for_backward(x, weight, targets, normaliser) -> ctx.save_for_backward(x, weight, targets, part) | the forward is right; backward normalises this rank's logits alone: keep the logsumexp over all ranks
        (normaliser - sums[1]) -> (normaliser - torch.cat(picked) * mine.flatten()) | only the rank that holds the target subtracts the target's logit: sum the logit over the ranks
        (normaliser - sums[1]) -> (largest - sums[1]) | the largest of the ranks' logsumexps is used: add up their exponentials, and take the logarithm of that
        mine = (own_ids >= 0) & (own_ids < len(weight)) -> mine = own_ids < len(weight) | an id below this rank's first counts as its own: the mask lacks its lower end
        mine = (own_ids >= 0) & (own_ids < len(weight)) -> mine = (own_ids >= 0) & (own_ids <= len(weight)) | the id after this rank's last counts as its own: the mask's upper end is one too far
        sums = torch.stack(((part - largest).exp(), torch.cat(picked) * mine.flatten()))\n        dist.all_reduce(sums, group=group) -> top, sums = torch.cat(picked) * mine.flatten(), (part - largest).exp()\n        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)\n        dist.all_reduce(sums, group=group)\n        sums = torch.stack((sums, top)) | the target's logit is the largest over the ranks: where it is negative, the others' 0 wins. Add them up
        index = own_ids.clamp(0, len(weight) - 1) -> index = own_ids.where(mine, 0) ;; torch.cat(picked) * mine.flatten() -> torch.cat(picked) | ranks that don't hold the target add their first word's logit instead: they must add 0
        dist.ReduceOp.MAX, group=group) -> group=group) | the ranks' largest logits are added up: reduce them with dist.ReduceOp.MAX
        largest = part.clone() -> largest = part | all_reduce overwrites this rank's largest with that of all ranks: give it a copy
        grad_weight += slope.t() @ rows\n        grad_x = torch -> grad_weight += slope.t() @ rows\n            dist.all_reduce(grad_weight, group=ctx.group)\n        grad_x = torch | the forward is right; the gradient of weight is summed over the ranks chunk by chunk, but each rank's rows are its own
        grad_weight += slope.t() @ rows\n        grad_x = torch -> grad_weight += slope.t() @ rows\n            for part in grads_x:\n                dist.all_reduce(part, group=ctx.group)\n        grad_x = torch ;; dist.all_reduce(grad_x, group=ctx.group) -> pass | the forward is right; each chunk's all-reduce adds up the earlier chunks again, which are sums already: reduce each chunk once, or all after the loop
         + dist.get_rank(ctx.group) * len(weight) ->  | the forward is right; backward takes every rank's words for 0 to v/t − 1: they begin at r·v/t
        torch.stack(((part - largest).exp(), -> torch.stack((part, ;; normaliser = sums[0].log() + largest -> normaliser = sums[0] | the ranks' logsumexps are added up: add up their exponentials, and take the logarithm of that
    """,
    "9.4": r"""
        entropy.clone().view(tokens.shape) -> entropy.mean().expand(tokens.shape).clone() | each token has the mean of all entropies: each has its own
        return torch.cat(chosen).view(tokens.shape), entropy.clone() -> return -torch.cat(chosen).view(tokens.shape), entropy.clone() | the first is the loss; the log-probability is its negative
        entropies.append(-(log_p -> entropies.append((log_p | the entropy has the wrong sign: it is −Σ p log p
        -(log_p.exp() * log_p).sum(-1) -> -log_p.sum(-1) | the entropy lacks the factor p
        -(log_p.exp() * log_p).sum(-1) -> -(log_p.exp() * log_p).sum(-1) / 0.6931471805599453 | the entropy is in bits: take the natural logarithm
        -(log_p.exp() * log_p).sum(-1) -> -(log_p.exp() * log_p).mean(-1) | the entropy is a mean over the words; it is a sum
        -(log_p.exp() * log_p).sum(-1) -> -(log_p.exp() * wide(rows)).sum(-1) | the entropy takes logits for log p: log p is the logit less logsumexp
        -(log_p.exp() * log_p).sum(-1) -> normalisers[-1] - (log_p.exp() * log_p).sum(-1) | the entropy has the logsumexp twice: log p has it already
        return torch.cat(chosen).view(tokens.shape), entropy.clone().view(tokens.shape) -> return entropy.clone().view(tokens.shape), torch.cat(chosen).view(tokens.shape) | the two are swapped: log-probabilities first
        up_entropy * (log_p + h) -> up_entropy * log_p | the forward is right; the gradient of the entropy lacks the part that comes through the logsumexp: −p (log p + H)
        up_entropy * (log_p + h) -> up_entropy * (log_p + 1) | the forward is right; the gradient of the entropy is that of −p log p for each p alone: but a logit moves all of them, so it is −p (log p + H)
        (up_chosen + up_entropy * (log_p + h)) -> (up_chosen - up_entropy * (log_p + h)) | the forward is right; the gradient of the entropy has the wrong sign: −p (log p + H)
        (up_chosen + up_entropy * (log_p + h)) -> up_chosen | the forward is right; the entropy gives no gradient: −p (log p + H)
        slope = -log_p.exp() * (up_chosen + up_entropy -> slope = -log_p.exp() * (up_entropy | the forward is right; the gradient of the log-probabilities is that of the token's logit alone: subtract p
        slope.scatter_add_(-1, ids, up_chosen) -> slope.scatter_add_(-1, ids, torch.ones_like(up_chosen)) | the forward is right; the 1 at the token is not multiplied by the incoming gradient of log p: add that gradient
        slope.scatter_add_(-1, ids, up_chosen) -> slope | the forward is right; the gradient of the log-probabilities lacks the 1 of the token itself
        torch.cat(normalisers), entropy)\n        return torch.cat(chosen) -> torch.cat(normalisers).to(logits.dtype), entropy)\n        return torch.cat(chosen) | right in float64; the logsumexp is rounded to 16 bits, kept or in backward, so that each probability is off by percents: leave it in 32
        (up_chosen + up_entropy * (log_p + h)) -> (-up_chosen + up_entropy * (log_p + h)) ;; ids, up_chosen) -> ids, -up_chosen) | the forward is right; the gradient of the log-probabilities has the wrong sign: 1 at the token, less p
        def backward(ctx, grad_chosen, grad_entropy) -> def backward(ctx, grad_entropy, grad_chosen) | the forward is right; the two incoming gradients are swapped: they come in the order of the results
        slope.scatter_add_(-1, ids, up_chosen) -> slope.scatter_(-1, ids, up_chosen) | the forward is right; the token's own gradient overwrites what is there: add it
        (up_chosen + up_entropy * (log_p + h)) -> (1 + up_entropy * (log_p + h)) | the forward is right; where p is subtracted, the incoming gradient is left out: multiply by it there too
        up_entropy * (log_p + h) -> up_entropy * (log_p - h) | the forward is right; the gradient of the entropy has H with the wrong sign: −p (log p + H)
    """,
    "9.5": r"""
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> words = ids.flatten().unique()\n        first = [ids.flatten().tolist().index(word) for word in words.tolist()]\n        ctx.main_grad.index_add_(0, words, wide(grad).flatten(0, 1)[first]) | if a word occurs several times, only its first gradient arrives: add that of every token
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad[ids.flatten()] += wide(grad).flatten(0, 1) | if a word occurs several times, only one of its gradients arrives: main_grad[ids] += … writes each row once. Use index_add_
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_copy_(0, ids.flatten(), wide(grad).flatten(0, 1)) | the rows of main_grad are overwritten; earlier microbatches have left their gradients there: add
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad[ids] = wide(grad) | the rows of main_grad are overwritten; earlier microbatches have left their gradients there: add
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.zero_().index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) | main_grad is emptied first; earlier microbatches have left their gradients there: add
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1), alpha=-1) | the gradient is subtracted: main_grad holds gradients, and the optimizer subtracts them
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) ->  | main_grad is unchanged: backward adds each token's gradient to the row of its id
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), (wide(grad) / torch.bincount(ids.flatten(), minlength=len(ctx.main_grad))[ids].unsqueeze(-1)).flatten(0, 1)) | a word's gradients are averaged over its repetitions: they add up
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), (wide(grad) / ids.numel()).flatten(0, 1)) | the gradient is divided by the number of tokens: if the loss is a mean, it has divided already
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.t().flatten(), wide(grad).flatten(0, 1)) | ids and gradients are flattened in different orders: row k of the one goes with id k of the other
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).transpose(0, 1).flatten(0, 1)) | ids and gradients are flattened in different orders: id k belongs to row k
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1))\n        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) | each gradient is added twice
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), (wide(grad) * (ids != 0).unsqueeze(-1)).flatten(0, 1)) | word 0 gets no gradient, as if it were padding: here it is a word like the others
        ctx.save_for_backward(ids)\n        ctx.main_grad = main_grad -> ctx.save_for_backward(ids, main_grad) ;; (ids,) = ctx.saved_tensors\n        ctx.main_grad -> ids, main_grad = ctx.saved_tensors\n        main_grad | with two microbatches in flight, autograd finds that main_grad has changed since it was saved, and refuses: hold it as an attribute of ctx
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.add_(torch.zeros_like(ctx.main_grad, dtype=grad.dtype).index_add_(0, ids.flatten(), grad.flatten(0, 1))) | right in float64; a word's gradients are added up in 16 bits: widen each, and add it to main_grad
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.copy_(ctx.main_grad.to(grad.dtype).index_add_(0, ids.flatten(), grad.flatten(0, 1))) | right in float64; main_grad is rounded to 16 bits: add to it in its own dtype
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids[:, -1], wide(grad)[:, -1]) | only the last sequence's gradients arrive: flatten ids and gradients
    """,
}
