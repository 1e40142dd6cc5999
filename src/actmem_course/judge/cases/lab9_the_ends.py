"""Lab 9: on what each answer is judged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.case import CaseRun
from actmem_course.judge.collective_outcomes import size_of, text_of
from actmem_course.judge.compare import check_tensors
from actmem_course.judge.observations import HalfTensor, SingleTensor, TensorSeen
from actmem_course.judge.saved_bytes import Largest
from actmem_course.judge.verdict import Wrong, mend

_S, _B = 25, 3
_TOKENS = _S * _B
#: Another right answer may keep other numbers of a token: 32 bytes of them, where ours keeps one sum.
_SPARE = (32 - 4) * _TOKENS
#: It doesn't divide the tokens.
_CHUNK = 24
_V, _H = 64, 24
_OVERFLOWS = mend(
    "subtract the largest first, on all ranks the same, or use logsumexp",
    "exp of a logit above 709 is infinite in float64, and so is the log of a softmax that is 0",
)
_SLOPE_ROUNDED = {
    "logits": mend(
        "compute p − 1 at the target in wide(logits), with a logsumexp of 32 bits; round at the end",
        "if p is near 1, 16 bits lose p − 1",
    )
}
_LOGITS = "the logits in 16 bits, and a few numbers a token"
_FREE = "free a chunk before you make the next"
_ROUNDED = mend("compute it in wide(logits)", "16 bits hold 3 digits")


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
    large = {"logits": 300 * logits}
    r.passes(own, large, upstream=across, prefix="for logits of a thousand, ", advice={"": _OVERFLOWS})
    half, sure = (20 * logits).bfloat16(), _sure(logits, targets)
    r.see_tensor("for bfloat16 logits, the loss", own(half.clone()), _ROUNDED, SingleTensor)
    r.passes(own, {"logits": sure}, kind=HalfTensor, prefix="for bfloat16 logits, ", advice=_SLOPE_ROUNDED)
    r.saves(own, half, what=_LOGITS, spare=_SPARE, others=[targets])


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
            collectives=False,
            advice={"": _OVERFLOWS} if scale > 1 else None,
        )
        for when, seen, enough in zip(("forward", "backward"), passes, (3 * r.t * size_of(upstream), size_of(x))):
            sent = sum(collective.payload_bytes for collective in seen.collectives)
            own_words = "a few numbers a token, since each rank makes the logits of its own words"
            what = own_words if when == "forward" else "x's gradient, each token's once"
            words = f"{when} sends {{found:,}} B ({text_of(seen.collectives)}) where {{enough:,}} are enough"
            r.see_cost(words, max(sent, enough) if r.t > 1 else 0, what, name=f"{prefix}bytes sent in {when}")

    def in_chunks(x: Tensor, w: Tensor) -> Tensor:
        return function(x, w, targets, _CHUNK)

    given = {"x": x, "weight": weight}
    where = "where x needs no gradient, "
    r.passes(in_chunks, given, upstream=upstream, prefix=where, collectives=False, frozen=("x",))
    _many_chunks(r, function, ranks)
    half, what = x.bfloat16(), "x, and a few numbers a token"
    r.saves(in_chunks, half, weight.bfloat16(), what=what, spare=_SPARE, others=[targets])
    r.see_tensor("for a bfloat16 x, the loss", in_chunks(half, weight.bfloat16()), _ROUNDED, SingleTensor)


def _many_chunks(r: CaseRun, function: Callable[..., Tensor], ranks: int) -> None:
    """What is made, and the sum over chunks alike, the first and last of 512 times the others: in bfloat16, 512 and
    1 are 512."""
    if not r.group_name:  # what is made depends on no group
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
        kind=HalfTensor,
        prefix="in 40 chunks of a bfloat16 x, ",
        advice={
            "": _ROUNDED,
            "weight": "add up the chunks in wide(weight)",
            "x": "compute p, and subtract 1 at the target, in wide(logits), and save their logsumexp in 32 bits",
        },
        collectives=False,
    )


def _costs_of_chunks(r: CaseRun, function: Callable[..., Tensor], ranks: int) -> None:
    x, weight, targets, chunk = r.same(300, 3, 2), r.each(512, 2), _tokens(r, ranks * 512, (300, 3), same=True), 26
    with FlopCounterMode(display=False) as flops:
        made = r.makes(lambda x, w: function(x, w, targets, chunk), {"x": x, "weight": weight}, r.same(300, 3))
    largest = max(chunk * 512, weight.numel(), x.numel())
    enough = 8 * (4 * chunk * 512 + 3 * weight.numel() + 3 * x.numel() + 10 * targets.numel())
    for when, one in made.items():
        at_once = one.elements // 512
        positions = ", in tokens, not in positions of all sequences" if at_once == 3 * chunk else ""
        words = (
            f"{when} makes {one.what}: {{found:,}} elements, "
            "where the logits of a chunk, x and weight have {enough:,} at most"
        )
        cause = f"{when} has the logits of {at_once} tokens at once, where a chunk has {chunk}{positions}"
        next_one = "use up a chunk's, and go on to the next"
        r.see_cost(words, max(largest, one.elements), next_one, cause, f"the largest tensor of {when}")
        r.see_peak(when, one, enough, _FREE)
    matmuls = -(-flops.get_total_flops() // (2 * targets.numel() * weight.numel()))
    words = "forward and backward run {found} matmuls of s·b·v·h where {enough} are enough"
    r.see_cost(words, matmuls, "one in forward, three in backward")


def log_probs_and_entropy(r: CaseRun) -> None:
    logits, tokens = 3 * r.each(_S, _B, _V), _tokens(r, _V)

    def own(x: Tensor) -> Tensor:
        what = "the log-probabilities of the tokens, and the entropies"
        answer = check_tensors(r["log_probs_and_entropy"](x, tokens, _CHUNK), what)
        for name, y in zip(("log-probabilities have", "entropies have"), answer):
            if y.shape != tokens.shape:
                raise Wrong(f"the {name} shape {list(y.shape)}; expected {list(tokens.shape)}")
        return torch.stack(list(answer), -1)

    r.passes(own, {"logits": logits})
    r.passes(own, {"logits": 300 * logits}, prefix="for logits of a thousand, ", advice={"": _OVERFLOWS})
    half = logits.bfloat16()
    r.see_tensor("for bfloat16 logits, what comes back", own(half.clone()), _ROUNDED, SingleTensor)
    r.passes(own, {"logits": half}, kind=HalfTensor, prefix="for bfloat16 logits, ", advice=_SLOPE_ROUNDED)
    # In 16 bits a probability near 1 is 1, and log p and −H of 64 words alike are the same.
    given = {"log-probabilities": _sure(logits, tokens), "entropies": (logits / 60).bfloat16()}
    for k, (what, rounded) in enumerate(given.items()):

        def alone(x: Tensor, chunk: int = _CHUNK) -> Tensor:
            return r["log_probs_and_entropy"](x, tokens, chunk)[k]  # noqa: B023

        prefix = f"if the {what} alone are used, "
        try:
            r.passes(alone, {"logits": logits}, prefix=prefix)
        except (AttributeError, TypeError) as error:
            symptom = f"{prefix}the other's gradient is None after set_materialize_grads(False) ({error})"
            raise Wrong(symptom, "take None as 0, or leave that call out") from None
        prefix += "and logits are bfloat16, "
        in_32_bits = {"logits": "compute it in wide(logits), and save a token's numbers in 32 bits"}
        advice = in_32_bits if k else _SLOPE_ROUNDED
        r.passes(lambda x: alone(x, 1), {"logits": rounded}, kind=HalfTensor, prefix=prefix, advice=advice)  # noqa: B023
    long, ids, chunk = 3 * r.each(100, 3, 512).bfloat16(), _tokens(r, 512, (100, 3)), 7

    def of_long(x: Tensor) -> Tensor:
        return torch.stack(list(r["log_probs_and_entropy"](x, ids, chunk)))

    both = r.makes(of_long, {"logits": long}, kind=HalfTensor, above=2)
    for times, (when, made) in enumerate(both.items(), 1):
        many = "{found:,} elements of more than 16 bits, where chunk tokens have {enough:,}"
        words = f"{when} makes {made.what}: {many}"
        r.see_cost(words, max(chunk * 512, made.elements), name=f"the largest wide tensor of {when}")
        r.see_peak(when, made, times * size_of(long) + 6 * 4 * chunk * 512 + 80 * ids.numel(), _FREE)
    r.saves(own, half, what=_LOGITS, spare=_SPARE - 4 * _TOKENS, others=[tokens])


def embedding(r: CaseRun) -> None:
    v, h = 100, 8
    ids, before = _tokens(r, v), r.each(v, h)
    for dtype, main_dtype, kind, prefix in (
        (torch.float64, torch.float64, TensorSeen, ""),
        (torch.bfloat16, torch.float32, SingleTensor, "for a bfloat16 weight, "),
    ):
        weight = r.each(v, h).to(dtype).requires_grad_()
        main, upstream = before.to(main_dtype, copy=True), r.each(_B, _S, h).transpose(0, 1).to(dtype)
        rows = r["embedding"](ids, weight, main)
        r.see_tensor(f"{prefix}the result", rows, kind=kind)
        if not rows.requires_grad:
            raise Wrong("the result has no graph, so backward never comes", "make it in a torch.autograd.Function")
        if not torch.equal(main, before.to(main_dtype)):
            raise Wrong("forward writes to main_grad", "only backward adds to it")
        if getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None):
            hook = "a hook on weight waits for its gradient, [v, h]"
            raise Wrong(hook, "add the rows in backward of a torch.autograd.Function")
        with Largest(weight, main, upstream) as made:
            rows.backward(upstream)
        none, had = "add to main_grad, and return None for weight", f"{prefix}weight has a .grad, as large as itself"
        r.see_cost(had, int(weight.grad is not None), none)
        words = f"{prefix}a tensor of {{found:,}} elements is made, and the rows that were looked up have {{enough:,}}"
        r.see_cost(words, max(rows.numel(), made.elements), "add them to main_grad where they belong")
        add = "add wide(gradient) of each token to the row of its id, and leave the other rows as they are"
        r.see_tensor(f"{prefix}main_grad", main, add, kind)
        for rows in [r["embedding"](ids, weight, main) for _ in range(2)]:
            rows.backward(upstream)
        r.see_tensor(f"{prefix}main_grad after two more microbatches, both forwards first,", main, add, kind)
    rows, others = r.each(_S, _B, h), [ids, before]
    r.saves(lambda x, w: r["embedding"](ids, w, before) + x, rows, weight, what="nothing beside ids", others=others)
