"""Lab 2's loss: cross entropy with the vocabulary shared among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import grad_of, summed
from actmem_course.judge.exchanged import SUM, USUAL
from actmem_course.judge.operators import size_of
from actmem_course.judge.passes import Passes, check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

_ROWS = 5
#: From which to before which id of its own a rank adds the target's logit, by what is wrong with that.
_BOUNDS = {
    "": (0, _ROWS),
    "a rank takes the first id after its own for one of its own: its last id is v/t − 1, so compare with <, not <=": (0, _ROWS + 1),
    "a rank takes the last id before its own for one of its own: its first id is 0, so compare with >= 0": (-1, _ROWS),
    "no rank adds the logit of the first id of its own: compare with >=, not >": (1, _ROWS),
    "no rank adds the logit of the last id of its own: compare with < v/t": (0, _ROWS - 1),
    "ranks that do not hold the target's logit add another logit instead: they must add 0": (-10**9, 10**9),
}  # fmt: skip


def check_cross_entropy(b: Bench) -> None:
    t = b.size
    s = max(4, t)
    logits = 3 * b.random(s, 3, _ROWS * t, seed=50)
    targets = (b.random(s, 3, seed=51) * 1e6).long().remainder(_ROWS * t)
    # The first and the last id of every rank, where an id off by one goes to another rank.
    ends = torch.arange(t, device=b.device) * _ROWS
    targets.view(-1)[: 2 * t] = torch.cat((ends, ends + _ROWS - 1))
    upstream = b.random(s, 3, seed=52)
    passes = _check_loss(b, logits, targets, upstream)
    if t > 1:
        _check_traffic(t, passes, logits)
    try:  # exp overflows unless the largest of all ranks is subtracted first
        _check_loss(b, 300 * logits, targets, upstream)
    except Wrong as wrong:
        raise Wrong(
            f"right for small logits; for logits of a thousand and more, {wrong}: subtract the largest logit of all ranks before exp"
        ) from None


def _check_loss(b: Bench, logits: Tensor, targets: Tensor, upstream: Tensor) -> Passes:
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    loss.backward(upstream)
    passes = run_passes(
        b,
        lambda x: b["vocab_parallel_cross_entropy"](x, targets, b.group),
        {"logits": b.shards(logits, dim=2)[b.rank]},
        expected=loss.detach(),
        upstream=upstream,
        more=_losses(b, b.shards(logits, dim=2), targets),
    )
    gradients = dict(_gradients(b, logits, targets, upstream))
    check_gradient(passes, "logits", b.shards(grad_of(leaf), dim=2)[b.rank], gradients, b.size)
    return passes


def _choices(*axes: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """One of each axis, the fewest mistakes first; the words of what is wrong ("" stands for the right one), and the values."""
    every = [tuple(zip(*chosen)) for chosen in product(*(axis.items() for axis in axes))]
    for words, values in sorted(every, key=lambda chosen: sum(map(bool, chosen[0]))):
        yield "; and ".join(filter(None, words)), values


def _losses(b: Bench, shards: list[Tensor], targets: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What comes out as the loss of every mistake in its two parts, log Σ exp and the target's logit, and of two at once."""
    tops = [part.amax(-1, keepdim=True) for part in shards]
    own_tops = "each rank subtracts the largest of its own logits, and these differ: all-reduce the largest first (MAX)"
    largest, found = torch.stack(tops).amax(0), []
    for shift, taken in (("", [0 * largest] * b.size), ("", [largest] * b.size), (own_tops, tops)):
        shifted = [part - top for part, top in zip(shards, taken)]
        found += [
            ("; and ".join(filter(None, (shift, words))), value)
            for words, value in _losses_of(b, shifted, targets, largest.squeeze(-1))
            if shift or words
        ]
    yield from sorted(found, key=lambda pair: pair[0].count("; and "))  # the fewest mistakes first
    right = torch.cat(shards, -1).logsumexp(-1) - summed(
        _picked(part, targets - rank * _ROWS, 0, _ROWS) for rank, part in enumerate(shards)
    )
    yield "the result has the wrong sign", -right
    yield "the result is the mean over all positions; expected one loss per position", right.mean()
    yield "the result is the sum over all positions; expected one loss per position", right.sum()


def _losses_of(b: Bench, shards: list[Tensor], targets: Tensor, largest: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same from logits from which something is subtracted already."""
    own, whole = shards[b.rank], torch.cat(shards, -1).logsumexp(-1)
    own_scaled = summed((part - part.amax(-1, keepdim=True)).exp().sum(-1) for part in shards).log()
    logarithms = {
        "": whole,
        "the result is this rank's own softmax: the sum of the exponentials must run over all ranks": own.logsumexp(-1),
        "the exponentials of the ranks are scaled by different largest logits before they are added: all-reduce the largest first (MAX)":
            own_scaled + own.amax(-1),
        "the largest logit is subtracted and not added back: subtract it from the target's logit too, or add it to the logarithm":
            whole - largest,
        "the largest logit is added back twice": whole + largest,
        "the ranks' logarithms are added up: add the sums of the exponentials, and take one logarithm": summed(
            part.logsumexp(-1) for part in shards
        ),
        "the logarithm of the sum is missing": whole.exp(),
        "the sum of the exponentials is averaged over the ranks: all-reduce with SUM, and divide by nothing": whole - torch.tensor(b.size).log(),
    }  # fmt: skip
    picked = {"the target's logit is not subtracted": 0 * whole}
    for bound, (first, beyond) in _BOUNDS.items():
        parts = [_picked(part, targets - rank * _ROWS, first, beyond) for rank, part in enumerate(shards)]
        for made in (SUM, *(made for made in USUAL if made is not SUM)):
            words = f"the target's logit is known only to the rank that holds it: it must be summed over the ranks, and is here {made.words}"
            value = made.make(parts, b.rank)
            if value.shape == whole.shape:
                picked["; and ".join(filter(None, ("" if made is SUM else words, bound)))] = value
    unshifted = summed(_picked(part, targets, 0, _ROWS) for part in shards)
    picked["the target ids are not shifted by the first id of this rank"] = unshifted
    for words, (logarithm, target) in _choices(logarithms, picked):
        yield words, logarithm - target


def _picked(part: Tensor, ids: Tensor, first: int, beyond: int) -> Tensor:
    """The logit of each id if that is among those that a rank takes, by number among its own, else 0."""
    logit = part.gather(-1, ids.clamp(0, _ROWS - 1).unsqueeze(-1)).squeeze(-1)
    return logit * ((ids >= first) & (ids < beyond))


def _gradients(b: Bench, logits: Tensor, targets: Tensor, upstream: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient of this rank's logits by every mistake, and by two at once."""
    own = b.shards(logits, dim=2)[b.rank]
    onehot = b.shards(F.one_hot(targets, _ROWS * b.size).to(own.dtype), dim=2)[b.rank]
    softmaxes = {
        "": b.shards(logits.softmax(-1), dim=2)[b.rank],
        "the gradient of logits is that of this rank's own softmax: divide by the sum over all ranks": own.softmax(-1),
        "the gradient of logits is that of the target's logit alone: none comes back through the sum of the exponentials, so its "
        "all-reduce needs a backward": torch.zeros_like(own),
    }
    ones = {
        "": onehot,
        "the gradient of logits is that of the softmax alone: subtract 1 at the target": torch.zeros_like(onehot),
        "every rank subtracts 1 from the gradient of a logit: only the rank that holds the target's may": F.one_hot(
            (targets - b.rank * _ROWS).clamp(0, _ROWS - 1), _ROWS
        ).to(own.dtype),
    }
    one, t = torch.ones_like(upstream), b.size
    incoming = {
        "": upstream,
        "the gradient of logits ignores the incoming gradient: multiply by it": one,
        "the gradient of logits is t times what it should be: the backward of a sum over the ranks must not all-reduce": t * upstream,
        "the gradient of logits is 1/t of what it should be: nothing in it is averaged over the ranks": upstream / t,
        "the gradient of logits has the wrong sign": -upstream,
    }  # fmt: skip
    for words, (softmax, target, grad) in _choices(softmaxes, ones, incoming):
        if words:
            yield words, (softmax - target) * grad.unsqueeze(-1)


def _check_traffic(t: int, passes: Passes, logits: Tensor) -> None:
    """A few numbers for each position may travel, no logits."""
    # Largest, sum and target, even if every rank's are gathered; of the logits it would be five of each rank.
    allowed = 3 * t * size_of(logits[..., 0])
    for when, seen in (("forward", passes.forward), ("backward", passes.backward)):
        sent = sum(c.payload_bytes for c in seen.collectives)
        if sent > allowed:
            raise Wrong(
                f"the numbers are right, but {when} exchanges {sent:,} B: the logits themselves are sent, where a few numbers per position are enough"
            )
