"""Lab 2's loss: cross entropy with the vocabulary shared among the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import grad_of, summed
from actmem_course.judge.lab_checks.operators import size_of
from actmem_course.judge.passes import check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


def check_cross_entropy(b: Bench) -> None:
    t, rows = b.size, 5
    s = max(4, t)
    logits = 3 * b.random(s, 3, rows * t, seed=50)
    targets = (b.random(s, 3, seed=51) * 1e6).long().remainder(rows * t)
    # The first and the last id of every rank, where an id off by one goes to another rank.
    ends = torch.arange(t, device=b.device) * rows
    targets.view(-1)[: 2 * t] = torch.cat((ends, ends + rows - 1))
    upstream = b.random(s, 3, seed=52)
    passes = _one(b, logits, targets, upstream)
    _check_traffic(b, passes, logits)
    # Large logits: exp overflows unless the largest of all ranks is subtracted first.
    _one(b, 300 * logits, targets, upstream, large=True)


def _one(b: Bench, logits: Tensor, targets: Tensor, upstream: Tensor, large: bool = False):
    shards = b.shards(logits, dim=2)
    own = shards[b.rank]
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    loss.backward(upstream)
    loss = loss.detach()
    mistakes = {} if large else _mistakes(b, shards, targets, loss)
    try:
        passes = run_passes(
            b,
            _without_gradient_of_targets(b, targets),
            {"logits": own},
            (),
            expected=loss,
            upstream=upstream,
            mistakes=mistakes,
        )
        gradient = b.shards(grad_of(leaf), dim=2)[b.rank]
        check_gradient(
            passes,
            "logits",
            gradient,
            {
                "the gradient of logits is t times what it should be: the backward of a sum over the ranks must not all-reduce": b.size
                * gradient,
                "the gradient of logits is that of the softmax alone: subtract 1 at the target": gradient
                + _onehot(b, targets, own) * upstream.unsqueeze(-1),
                "the gradient of logits ignores the incoming gradient: multiply by it": gradient
                / upstream.unsqueeze(-1),
            },
            b.size,
        )
    except Wrong as wrong:
        if large:
            raise Wrong(
                f"right for small logits; for logits of a thousand and more, {wrong}: subtract the largest logit of all ranks before exp"
            ) from None
        raise
    return passes


def _without_gradient_of_targets(b: Bench, targets: Tensor):
    return lambda logits: b["vocab_parallel_cross_entropy"](logits, targets, b.group)


def _onehot(b: Bench, targets: Tensor, own: Tensor) -> Tensor:
    """1 at the targets that are among this rank's logits."""
    return F.one_hot(targets, own.shape[-1] * b.size).to(own.dtype).chunk(b.size, -1)[b.rank]


def _mistakes(b: Bench, shards: list[Tensor], targets: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """What comes out of each common mistake."""
    rows, own = shards[0].shape[-1], shards[b.rank]
    logits = torch.cat(shards, -1)
    whole, target = logits.logsumexp(-1), loss - logits.logsumexp(-1)

    def picked(part: Tensor, first: int) -> Tensor:
        return part.gather(-1, (targets - first).clamp(0, rows - 1).unsqueeze(-1)).squeeze(-1)

    every = summed(picked(part, rank * rows) for rank, part in enumerate(shards))
    own_target = picked(own, b.rank * rows) * _onehot(b, targets, own).sum(-1)

    def bounded(first: int, beyond: int) -> Tensor:
        """The target's logit if a rank takes the ids from ``first`` up to ``beyond``, by number among its own."""
        return summed(
            picked(part, rank * rows) * ((targets - rank * rows >= first) & (targets - rank * rows < beyond))
            for rank, part in enumerate(shards)
        )

    own_max = summed((part - part.amax(-1, keepdim=True)).exp().sum(-1) for part in shards).log()
    return {
        "the result is this rank's own softmax: the sum of the exponentials must run over all ranks": own.logsumexp(-1)
        + target,
        "the exponentials of the ranks are scaled by different largest logits before they are added: all-reduce the largest first (MAX)": own_max
        + own.amax(-1)
        + target,
        "ranks that do not hold the target's logit add another logit instead: they must add 0": whole - every,
        "the target's logit is known only to the rank that holds it: it must be summed over the ranks": whole
        - own_target,
        "the largest logit is subtracted and not added back: subtract it from the target's logit too, or add it to the logarithm": loss
        - logits.amax(-1),
        "the result has the wrong sign": -loss,
        "the result is the mean over all positions; expected one loss per position": loss.mean(),
        "a rank takes the first id after its own for one of its own: its last id is v/t − 1, so compare with <, not <=": whole
        - bounded(0, rows + 1),
        "a rank takes the last id before its own for one of its own: its first id is 0, so compare with >= 0": whole
        - bounded(-1, rows),
        "no rank adds the logit of the first id of its own: compare with >=, not >": whole - bounded(1, rows),
        "no rank adds the logit of the last id of its own: compare with < v/t": whole - bounded(0, rows - 1),
        "the target ids are not shifted by the first id of this rank": whole
        - sum(picked(part, 0) * (targets < rows) for part in shards),
    }


def _check_traffic(b: Bench, passes, logits: Tensor) -> None:
    """A few numbers for each position may travel, no logits."""
    if b.size == 1:
        return
    # Largest, sum and target, even if every rank's are gathered; of the logits it would be five of each rank.
    allowed = 3 * b.size * size_of(logits[..., 0])
    for when, seen in (("forward", passes.forward), ("backward", passes.backward)):
        sent = sum(c.payload_bytes for c in seen.collectives)
        if sent > allowed:
            raise Wrong(
                f"the numbers are right, but {when} exchanges {sent:,} B: the logits themselves are sent, where a few numbers per position are enough"
            )
