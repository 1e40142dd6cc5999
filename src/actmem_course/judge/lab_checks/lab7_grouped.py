"""Lab 7: key and value heads that several ranks hold: who holds which, and whose gradients add up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import check_tensor, close, summed
from actmem_course.judge.exchanged import OWN_PART, Made, explain_exchange
from actmem_course.judge.lab_checks.lab7_operators import Weights
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import core_attention, merge_heads

#: d and h for each rank, so that whoever cuts a head or the wrong dimension gets a part, too.
_HEAD_SIZE, _HIDDEN_SIZE = 2, 3
_NAMES = ("q_weight", "k_weight", "v_weight", "projection_weight")


def _cases(b: Bench) -> Iterator[tuple[str, int, int, dict[str, Tensor]]]:
    """In words, a, k, and unsharded weights: fewer key and value heads than ranks, as many, more."""
    a, h, d = 4 * b.size, _HIDDEN_SIZE * b.size, _HEAD_SIZE * b.size
    for k in sorted({1, most_shared(b.size), b.size, 2 * b.size, a}):
        sizes = ((a * d, h), (k * d, h), (k * d, h), (h, a * d))
        words = f"{k} key and value head{'s' * (k > 1)} on {b.size} rank{'s' * (b.size > 1)}"
        yield words, a, k, {name: b.random(*size, seed=20 + i) for i, (name, size) in enumerate(zip(_NAMES, sizes))}


def most_shared(t: int) -> int:
    """The largest number of key and value heads that t ranks have to share; 1 on one rank."""
    return max(k for k in range(1, max(2, t)) if t % k == 0)


def _part(whole: Weights, k: int, rank: int, t: int) -> dict[str, Tensor]:
    """Rank's part of the weights, or of their gradients."""
    held = {"q_weight": (t, 0), "k_weight": (min(t, k), 0), "v_weight": (min(t, k), 0), "projection_weight": (t, 1)}
    return {name: whole[name].chunk(parts, dim)[rank * parts // t] for name, (parts, dim) in held.items()}


def check_split_grouped_heads(b: Bench) -> None:
    for words, a, k, whole in _cases(b):
        with b.watching():
            answer = b["split_grouped_heads"](*whole.values(), a, k, b.group)
        if not isinstance(answer, (tuple, list)) or len(answer) != 4:
            raise Wrong(f"expected four tensors: this rank's {', '.join(_NAMES)}")
        for (name, right), found in zip(_part(whole, k, b.rank, b.size).items(), answer):
            mistakes = _wrong_heads(name, whole[name], k, b.rank, b.size) if name in ("k_weight", "v_weight") else {}
            check_tensor(
                f"{words}: this rank's {name}", found, right, {f"{words}: {m}": v for m, v in mistakes.items()}
            )


def _wrong_heads(name: str, full: Tensor, k: int, rank: int, t: int) -> dict[str, Tensor]:
    parts = min(t, k)
    read = f"its query heads read part {rank * parts // t}: neighbours share a head, so it is rank · k // t"
    return {
        f"{name} is cut into t parts, and so is the head: no query finds its whole key. With t > k a rank takes one whole head, "
        "the same as its neighbours": full.chunk(t)[rank],
        f"every rank has all heads of {name}; it needs those that its own query heads read": full,
        f"of min(t, k) parts of {name} this rank has part {rank % parts} (rank % k), and {read}": full.chunk(parts)[rank % parts],
        f"of min(t, k) parts of {name} every rank has part 0, and {read}": full.chunk(parts)[0],
    }  # fmt: skip


def check_sum_shared_gradients(b: Bench) -> None:
    x, upstream = (b.random(5, 2, _HIDDEN_SIZE * b.size, seed=seed) for seed in (30, 31))
    for words, _, k, whole in _cases(b):
        right = _part(_gradients(x, upstream, whole, b.size), k, b.rank, b.size)
        ranks = [_gradients(x, upstream, _part(whole, k, rank, b.size), b.size) for rank in range(b.size)]
        own = _part(whole, k, b.rank, b.size)
        weights = {name: own[name].clone().requires_grad_() for name in ("k_weight", "v_weight")}
        for name, weight in weights.items():
            weight.grad = ranks[b.rank][name].clone()
        with b.watching() as seen:
            try:
                b["sum_shared_gradients"](*weights.values(), k, b.group)
            finally:
                if seen.groups:
                    raise Wrong(
                        "it makes a process group: all ranks must make it together, at each call. Exchange within group: a place "
                        "for each head, with zeros for the others', and one all-reduce"
                    )
        for name, weight in weights.items():
            if not torch.equal(weight.detach(), own[name]):
                raise Wrong(f"{name} itself is changed; only its .grad may be")
            parts = [of_rank[name] for of_rank in ranks]
            what = f"{words}: {name}.grad"
            check_tensor(what, weight.grad, right[name], t=b.size, explain=lambda y: _explain(y, parts, k, b.rank))


def _gradients(x: Tensor, upstream: Tensor, weights: Weights, t: int) -> dict[str, Tensor]:
    """Of plain attention with as many heads as the weights have: each group of queries reads a copy of its key and value."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}

    def heads(name: str, copies: int) -> Tensor:
        y = (
            F.linear(x, leaves[name]).unflatten(-1, (-1, _HEAD_SIZE * t)).repeat_interleave(copies, 2)
        )  # [s, b, heads, d]
        return y.flatten(1, 2).transpose(0, 1)

    group = len(weights["q_weight"]) // len(weights["k_weight"])
    context = core_attention(heads("q_weight", 1), heads("k_weight", group), heads("v_weight", group))
    y = F.linear(merge_heads(context, x.shape[1]), leaves["projection_weight"])
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), upstream)))


def _explain(found: Tensor, parts: list[Tensor], k: int, rank: int) -> list[str]:
    """How a gradient comes of every rank's part, and what to do."""
    share = max(1, len(parts) // k)
    first = rank // share * share
    alike = Made(
        f"the sum of those of ranks {first} to {first + share - 1}", lambda p, _: summed(p[first : first + share])
    )
    if share == 1:
        return explain_exchange(found, parts, rank, OWN_PART, "with t <= k no two ranks hold the same head")
    must = f"backward must sum over the {share} ranks that share a key head, because each found it from its own query heads"
    if close(found, summed(parts[rank % k :: k])):
        return [f"is summed over the ranks rank % k, rank % k + k, …; neighbours share a head, rank · k // t: {must}"]
    return explain_exchange(found, parts, rank, alike, must)
