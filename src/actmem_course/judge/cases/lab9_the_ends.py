"""Lab 9: its cases, the functions that test a learner's answers."""

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.judge.case import CaseRun
from actmem_course.judge.observations import HalfTensor, SingleTensor
from actmem_course.judge.verdict import mend

_S, _B = 25, 3
_TOKENS = _S * _B
#: Bytes beyond ours that are right too: another answer may save 32 bytes for each token, where ours saves one sum.
_SPARE = (32 - 4) * _TOKENS
#: Tokens of a chunk.  They don't divide all tokens.
_CHUNK = 24
_V, _H = 64, 24
_OVERFLOWS = mend(
    "subtract the largest first, or use logsumexp",
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


def _tokens(r: CaseRun, v: int, sizes: tuple[int, int] = (_S, _B)) -> Tensor:
    """Draw token ids from 0 to v − 1; the first and the last are among them, and id 2 is there three times."""
    ids = (r.each(*sizes) * 1e6).long().remainder(v)
    ids.view(-1)[:6] = torch.tensor([0, v - 1, 2, 2, 2, v // 2], device=ids.device)
    return ids


def cross_entropy(r: CaseRun) -> None:
    logits, targets = 3 * r.each(_S, _B, _V), _tokens(r, _V)

    def own(x: Tensor) -> Tensor:
        return r["cross_entropy"](x, targets)

    r.observe(own, {"logits": logits})
    across = r.each(_B, _S).t()  # not contiguous, as what a transposition gives
    large = {"logits": 300 * logits}
    r.observe(own, large, upstream=across, prefix="for logits of a thousand, ", advice={"": _OVERFLOWS})
    # The second gives each target a probability near 1.
    half, sure = (20 * logits).bfloat16(), (logits / 3).scatter(-1, targets.unsqueeze(-1), 8).bfloat16()
    r.see_tensor("for bfloat16 logits, the loss", own(half.clone()), _ROUNDED, SingleTensor)
    r.observe(own, {"logits": sure}, kind=HalfTensor, prefix="for bfloat16 logits, ", advice=_SLOPE_ROUNDED)
    r.saves(own, half, what=_LOGITS, spare=_SPARE, others=[targets])


def linear_cross_entropy(r: CaseRun) -> None:
    x, weight, targets = r.each(_S, _B, _H), r.each(_V, _H), _tokens(r, _V)
    upstream = r.each(_B, _S).t()

    def in_chunks(x: Tensor, w: Tensor) -> Tensor:
        return r["linear_cross_entropy"](x, w, targets, _CHUNK)

    def in_one(x: Tensor, w: Tensor) -> Tensor:
        return r["linear_cross_entropy"](x, w, targets, 2 * _TOKENS)

    given, prefix = {"x": x, "weight": weight}, "for logits of a thousand, in one chunk, "
    r.observe(in_chunks, given, upstream=upstream)
    r.observe(in_one, {"x": 300 * x, "weight": weight}, upstream=upstream, prefix=prefix, advice={"": _OVERFLOWS})
    r.observe(in_chunks, given, upstream=upstream, prefix="where x needs no gradient, ", frozen=("x",))
    _see_costs_of_chunks(r)
    _see_many_chunks(r)
    half, what = x.bfloat16(), "x, and a few numbers a token"
    r.saves(in_chunks, half, weight.bfloat16(), what=what, spare=_SPARE, others=[targets])
    r.see_tensor("for a bfloat16 x, the loss", in_chunks(half, weight.bfloat16()), _ROUNDED, SingleTensor)


def _see_many_chunks(r: CaseRun) -> None:
    """Note the gradient of the weight over 40 equal chunks, of which the first and the last count 512 times as much.

    Added up in bfloat16 it would be wrong: there 512 and 1 are 512.
    """
    # One word a coordinate, so that logits are weights: no product rounds them.  The targets' probabilities are near 1.
    rows, ids = torch.eye(3, _H, device=r.device).expand(40, 3, _H), torch.tensor([1, 2, 3], device=r.device)
    vocabulary = r.each(_V, _H)
    vocabulary[ids, ids - 1] = 8.0
    ends = torch.ones(40, 3, device=r.device)
    ends[0] = ends[-1] = 512
    r.observe(
        lambda x, w: r["linear_cross_entropy"](x, w, ids.expand(40, 3), 3),
        {"x": rows.bfloat16(), "weight": vocabulary.bfloat16()},
        upstream=ends,
        kind=HalfTensor,
        prefix="in 40 chunks of a bfloat16 x, ",
        advice={
            "": _ROUNDED,
            "weight": "add up the chunks in wide(weight)",
            "x": "compute p, and subtract 1 at the target, in wide(logits), and save their logsumexp in 32 bits",
        },
    )


def _see_costs_of_chunks(r: CaseRun) -> None:
    x, weight, targets, chunk = r.each(300, 3, 2), r.each(512, 2), _tokens(r, 512, (300, 3)), 26
    with FlopCounterMode(display=False) as flops:
        passes = r.makes(
            lambda x, w: r["linear_cross_entropy"](x, w, targets, chunk), {"x": x, "weight": weight}, r.each(300, 3)
        )
    largest = max(chunk * 512, weight.numel(), x.numel())
    enough = 8 * (4 * chunk * 512 + 3 * weight.numel() + 3 * x.numel() + 10 * targets.numel())
    for when, noted in passes.items():
        at_once = noted.elements // 512
        positions = ", in tokens, not in positions of all sequences" if at_once == 3 * chunk else ""
        words = (
            f"{when} makes {noted.what}: {{found:,}} elements, "
            "where the logits of a chunk, x and weight have {enough:,} at most"
        )
        cause = f"{when} has the logits of {at_once} tokens at once, where a chunk has {chunk}{positions}"
        next_one = "use up a chunk's, and go on to the next"
        r.see_cost(words, max(largest, noted.elements), next_one, cause, f"the largest tensor of {when}")
        r.see_peak(when, noted, enough, _FREE)
    matmuls = -(-flops.get_total_flops() // (2 * targets.numel() * weight.numel()))
    words = "forward and backward run {found} matmuls of s·b·v·h where {enough} are enough"
    r.see_cost(words, matmuls, "one in forward, three in backward")
