"""Lab 9: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.case import CaseRun
from actmem_course.judge.exchanged import size_of
from actmem_course.judge.kept import Largest
from actmem_course.judge.verdict import Wrong

_S, _B = 25, 3
_TOKENS = _S * _B
#: Another right answer may keep other numbers of a token: 32 bytes of them, where ours keeps one sum.
_SPARE = (32 - 4) * _TOKENS
#: Neither divides the tokens.  So many positions of all sequences are more tokens, and so many chunks longer ones.
_CHUNK, _SHORT = 24, 2
_V, _H = 64, 24
_OVERFLOWS = "exp of a logit above 709 is infinite in float64, and so is the log of a softmax that is 0: log p is the logit less logsumexp"
_SLOPE_ROUNDED = {"logits": "compute it in wide(logits), and go back to the dtype of logits at the end"}
_ROUNDED = "compute the loss in wide(logits): 16 bits hold 3 digits of it"


def _tokens(r: CaseRun, v: int, same: bool = False) -> Tensor:
    """Ids from 0 to v − 1, first and last among them, and one three times."""
    ids = ((r.same if same else r.each)(_S, _B) * 1e6).long().remainder(v)
    ids.view(-1)[:6] = torch.tensor([0, v - 1, 2, 2, 2, v // 2], device=ids.device)
    return ids


def cross_entropy(r: CaseRun) -> None:
    logits, targets = 3 * r.each(_S, _B, _V), _tokens(r, _V)

    def own(x: Tensor) -> Tensor:
        return r["cross_entropy"](x, targets)

    r.passes(own, {"logits": logits})
    r.passes(own, {"logits": 300 * logits}, prefix="for logits of a thousand, ", why={"": _OVERFLOWS})
    half = (20 * logits).bfloat16()
    r.see_tensor("for bfloat16 logits, the loss", own(half.clone()), "near", _ROUNDED)
    r.passes(own, {"logits": half}, how="half", prefix="for bfloat16 logits, ", why=_SLOPE_ROUNDED)
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
    upstream, others = r.same(_S, _B), max(weight.numel(), x.numel())
    words = "a tensor of {found:,} elements is made, where the logits of a chunk, x and weight have {enough:,} at most: make the logits "
    words += "of ``chunk`` tokens, use them up, and go on to the next, in forward and in backward"
    many = "forward and backward run {found} products of s·b·v·h where {enough} are enough: one in forward, three in backward"
    for chunk, scale, prefix in (
        (_CHUNK, 1, ""),
        (_SHORT, 1, f"with {_SHORT} tokens a chunk, "),
        (2 * _TOKENS, 300, "for logits of a thousand, in one chunk, "),
    ):
        flops = FlopCounterMode(display=False)
        with Largest(x, weight) as made, nullcontext() if prefix else flops:
            passes = r.passes(
                lambda x, w: function(x, w, targets, chunk),  # noqa: B023
                {"x": scale * x, "weight": weight},
                upstream=upstream,
                prefix=prefix,
                exchanges=False,
                why={"": _OVERFLOWS} if scale > 1 else None,
            )
        enough = max(others, min(chunk, _TOKENS) * _V)
        r.see(f"{prefix}the largest tensor made", max(enough, made.elements), "most", words)
        if not prefix:
            r.see("products", -(-flops.get_total_flops() // (2 * _TOKENS * weight.numel())), "most", many)
        for when, seen, enough in zip(("forward", "backward"), passes, (3 * r.t * size_of(upstream), size_of(x))):
            sent = sum(collective.payload_bytes for collective in seen.collectives)
            said = f"{when} exchanges {{found:,}} B where {{enough:,}} are enough: a few numbers a token in forward, x's gradient in backward"
            r.see(f"{prefix}bytes sent in {when}", max(sent, enough) if r.t > 1 else 0, "most", said)
    half, words = x.bfloat16(), "x, and a few numbers a token"

    def in_chunks(x: Tensor, w: Tensor) -> Tensor:
        return function(x, w, targets, _CHUNK)

    r.keeps(in_chunks, half, weight.bfloat16(), what=words, spare=_SPARE, others=[targets])
    r.see_tensor("for a bfloat16 x, the loss", in_chunks(half, weight.bfloat16()), "near", _ROUNDED)


def log_probs_and_entropy(r: CaseRun) -> None:
    logits, tokens = 3 * r.each(_S, _B, _V), _tokens(r, _V)

    def own(x: Tensor, chunk: int = _CHUNK) -> Tensor:
        answer = r["log_probs_and_entropy"](x, tokens, chunk)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2 or not all(isinstance(y, Tensor) for y in answer):
            raise Wrong("expected two tensors: the log-probabilities of the tokens, and the entropies")
        for name, y in zip(("log-probabilities have", "entropies have"), answer):
            if y.shape != tokens.shape:
                raise Wrong(f"the {name} shape {list(y.shape)}; expected {list(tokens.shape)}")
        return torch.stack(list(answer))

    r.passes(own, {"logits": logits})
    r.passes(own, {"logits": 300 * logits}, prefix="for logits of a thousand, ", why={"": _OVERFLOWS})
    one = torch.stack([torch.zeros_like(tokens), torch.ones_like(tokens)]).double()
    r.passes(own, {"logits": logits}, upstream=one, prefix="for the entropy alone, ")
    half = logits.bfloat16()
    r.see_tensor("for bfloat16 logits, what comes back", own(half.clone()), "near", _ROUNDED)
    enough = half.numel() * half.element_size()
    words = "a tensor of {found:,} B is made, where logits have {enough:,}: widen ``chunk`` tokens at a time, in forward and in backward"
    for chunk in (_CHUNK, 1):
        prefix = f"for bfloat16 logits, {chunk} in a chunk, "
        with Largest(half) as made:
            r.passes(
                lambda x: own(x, chunk),  # noqa: B023
                {"logits": half},
                how="half",
                prefix=prefix,
                why=_SLOPE_ROUNDED,
            )
        r.see(f"{prefix}the largest tensor made", max(enough, made.bytes), "most", words)
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
        main, upstream = before.to(main_dtype, copy=True), r.each(_S, _B, h).to(dtype)
        rows = r["embedding"](ids, weight, main)
        r.see_tensor(f"{prefix}the result", rows, how)
        if not rows.requires_grad:
            raise Wrong("the result has no graph, so backward never comes: make it in a torch.autograd.Function")
        if not torch.equal(main, before.to(main_dtype)):
            raise Wrong("forward writes to main_grad; only backward adds to it")
        words = "a tensor of {found:,} elements is made, and the rows that were looked up have {enough:,}: add them to main_grad where they belong"
        with Largest(weight, main, upstream) as made:
            rows.backward(upstream)
        r.see(f"{prefix}the largest tensor made", max(rows.numel(), made.elements), "most", words)
        why = "add wide(gradient) of each token to the row of its id, and leave the other rows as they are"
        r.see_tensor(f"{prefix}main_grad", main, how, why)
        words = "weight has a .grad, as large as itself: add to main_grad, and return None for weight"
        r.see(f"{prefix}gradients of weight", int(weight.grad is not None), "most", words)
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
        return normaliser - target -> return (normaliser - target).sum() | the result is the sum over all tokens; expected one loss a token
        slope.new_full((*targets.shape, 1), -1)) -> slope.new_full((*targets.shape, 1), 0)) | the forward is right; the gradient of logits is that of the softmax alone: subtract 1 at the target
        slope.new_full((*targets.shape, 1), -1)) -> slope.new_full((*targets.shape, 1), 1)) | the forward is right; the gradient adds 1 at the target: subtract it
        slope = (wide(logits) - normaliser.unsqueeze(-1)).exp() -> slope = torch.zeros_like(wide(logits)) | the forward is right; the gradient of logits is that of the target's logit alone: none comes through the sum of the exponentials
        (slope * grad.unsqueeze(-1)).to(logits.dtype), None -> slope.to(logits.dtype), None | the forward is right; the gradient of logits ignores the incoming gradient: multiply by it
        (slope * grad.unsqueeze(-1)).to(logits.dtype), None -> (slope * grad.unsqueeze(-1)).to(logits.dtype) / grad.numel(), None | the forward is right; the gradient of logits is that of a mean: each token's loss is its own
    """,
    "9.2": r"""
        logits = wide(F.linear(rows, weight))\n            normalisers.append(logits.logsumexp(-1))\n            losses -> logits = wide(F.linear(rows, weight))\n            normalisers.append(logits.exp().sum(-1).log())\n            losses | for logits of a thousand, exp overflows: subtract the largest first, or use logsumexp
        losses.append(normalisers[-1] - logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)) -> losses.append(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalisers[-1]) | the result is the log-probability of the target; the loss is its negative
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1 -> pass | the forward is right; the gradients are those of the softmax alone: subtract 1 at the target
        grad_weight += slope.t() @ rows\n        return torch.cat(grads_x).view(x.shape), grad_weight.to(weight.dtype), None, None\n -> grad_weight = slope.t() @ rows\n        return torch.cat(grads_x).view(x.shape), grad_weight.to(weight.dtype), None, None\n | the forward is right; the gradient of weight is the last chunk's alone: add up those of all chunks
        slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) -> slope = slope.to(x.dtype)\n            grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) | the forward is right; the gradients ignore the incoming gradient: multiply each token's by it
        slope[torch.arange(len(ids), device=ids.device), ids] -= 1 -> slope.zero_()[torch.arange(len(ids), device=ids.device), ids] -= 1 | the forward is right; the gradients are those of the target's logit alone: none comes through the sum of the exponentials
        grads_x.append(slope @ weight)\n            grad_weight += slope.t() @ rows\n        return torch.cat(grads_x) -> grads_x.append(slope @ weight)\n            grad_weight += (slope / upstream.unsqueeze(-1) * grad.mean()).t() @ rows\n        return torch.cat(grads_x) | the forward is right; the gradient of weight has the mean of the incoming gradients in place of each token's: forward can't know them, so make it in backward
        return torch.cat(losses).view(targets.shape) -> return torch.cat([part.mean().expand_as(part) for part in losses]).view(targets.shape) | each token has the mean loss of its chunk; expected its own
    """,
    "9.3": r"""
        dist.all_reduce(grad_x, group=ctx.group) ->  | the forward is right; the gradient of x is this rank's own part, that of its words: add up the ranks' parts
        return grad_x, grad_weight.to(weight.dtype) -> dist.all_reduce(grad_weight, group=ctx.group)\n        return grad_x, grad_weight.to(weight.dtype) | the forward is right; the gradient of weight is the sum over the ranks, but each rank's rows are its own
        (ids.unsqueeze(-1) == own_rows).int() -> 0 | the forward is right; the gradients are those of the softmax alone: subtract 1 at the target, on the rank that holds it
        normaliser = sums[0].log() + largest -> normaliser = part | this rank's logits alone are normalised: the sum of the exponentials is over all ranks
        normaliser = sums[0].log() + largest -> normaliser = sums[0].log() | the largest is subtracted and not added back
        torch.cat(picked) * mine.flatten() -> torch.cat(picked) | ranks that don't hold the target add another logit instead: they must add 0
        own_ids = targets - dist.get_rank(group) * len(weight) -> own_ids = targets | the ids are not shifted by the first id of this rank
        largest = part.clone()\n        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) -> largest = torch.zeros_like(part) | for logits of a thousand, exp overflows: the largest of all ranks is subtracted first
        largest = part.clone()\n        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) -> largest = part.clone() | each rank subtracts a largest of its own before the sum: all must subtract the same
    """,
    "9.4": r"""
        return torch.cat(chosen).view(tokens.shape), entropy.clone() -> return -torch.cat(chosen).view(tokens.shape), entropy.clone() | the first is the loss; the log-probability is its negative
        entropies.append(-(log_p -> entropies.append((log_p | the entropy has the wrong sign: it is −Σ p log p
        -(log_p.exp() * log_p).sum(-1) -> -log_p.sum(-1) | the entropy lacks the factor p
        -(log_p.exp() * log_p).sum(-1) -> -(log_p.exp() * log_p).sum(-1) / 0.6931471805599453 | the entropy is in bits: take the natural logarithm
        -(log_p.exp() * log_p).sum(-1) -> -(log_p.exp() * log_p).mean(-1) | the entropy is a mean over the words; it is a sum
        -(log_p.exp() * log_p).sum(-1) -> normalisers[-1] - (log_p.exp() * log_p).sum(-1) | the entropy has the normaliser twice: log p has it already
        return torch.cat(chosen).view(tokens.shape), entropy.clone().view(tokens.shape) -> return entropy.clone().view(tokens.shape), torch.cat(chosen).view(tokens.shape) | the two are swapped: log-probabilities first
        up_entropy * (log_p + h) -> up_entropy * log_p | the forward is right; the gradient of the entropy lacks the part that comes through the normaliser: −p (log p + H)
        up_entropy * (log_p + h) -> up_entropy * (log_p + 1) | the forward is right; the gradient of the entropy is that of −p log p with p for a free number: logits move all of p, −p (log p + H)
        (up_chosen + up_entropy * (log_p + h)) -> (up_chosen - up_entropy * (log_p + h)) | the forward is right; the gradient of the entropy has the wrong sign: −p (log p + H)
        (up_chosen + up_entropy * (log_p + h)) -> up_chosen | the forward is right; the entropy gives no gradient: −p (log p + H)
        slope = -log_p.exp() * (up_chosen + up_entropy -> slope = -log_p.exp() * (up_entropy | the forward is right; the gradient of the log-probabilities is that of the token's logit alone: subtract p
        slope.scatter_add_(-1, ids, up_chosen) -> slope | the forward is right; the gradient of the log-probabilities lacks the 1 of the token itself
    """,
    "9.5": r"""
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad[ids.flatten()] += wide(grad).flatten(0, 1) | if a word occurs several times, only one of its gradients arrives: main_grad[ids] += … writes each row once. Use index_add_
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_copy_(0, ids.flatten(), wide(grad).flatten(0, 1)) | the rows of main_grad are overwritten; earlier microbatches have left their gradients there: add
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.zero_().index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) | main_grad is emptied first; earlier microbatches have left their gradients there: add
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) -> ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1), alpha=-1) | the gradient is subtracted: main_grad holds gradients, and the optimizer subtracts them
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)) ->  | main_grad is unchanged: backward adds each token's gradient to the row of its id
    """,
}
