"""The four operators: what each pass makes of the ranks' parts, why, and how a learner's own is judged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd import Function

from actmem.measure.comms import Collective
from actmem_course.judge.kept import check_keeps
from actmem_course.judge.lab_checks.exchanged import JOINED, OWN_PART, SHARE, SUM, Made, Parts, explain_exchange
from actmem_course.judge.passes import check_collectives, check_gradient, run_passes
from actmem_course.judge.virtual import Watch
from actmem_course.judge.workbench import Bench


@dataclass(frozen=True)
class Operator:
    """forward, backward: what each makes of the ranks' parts, and below what to do there and why."""

    name: str
    forward: Made
    backward: Made
    in_forward: str
    in_backward: str
    place: str

    def __call__(self, parts: Parts) -> list[Tensor]:
        """The operator on all ranks at once, with its backward."""
        return list(_OnAll.apply(self.forward, self.backward, *parts))


class _OnAll(Function):
    @staticmethod
    def forward(ctx, forward: Made, backward: Made, *parts: Tensor):
        ctx.backward_of = backward
        return tuple(y.clone() for y in forward.on_all(parts))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, *ctx.backward_of.on_all(grads)


F_OPERATOR = Operator(
    "f", OWN_PART, SUM,
    "f's forward must return x as it is: every rank has the same x already",
    "f's backward must all-reduce once, with SUM: each rank's gradient comes from its own slice of the weight, and they add up",
    "at the entry, once",
)  # fmt: skip
F_BAR_OPERATOR = Operator(
    "f_bar", SUM, OWN_PART,
    "f_bar's forward must all-reduce once, with SUM: the ranks' x are the terms of a sum",
    "f_bar's backward must pass the gradient on unchanged, without an all-reduce: after the sum every rank runs the same code, so "
    "each already holds the whole gradient",
    "right after the row-parallel product",
)  # fmt: skip
G_OPERATOR = Operator(
    "g", JOINED, SHARE,
    "g's forward gathers the tokens of all ranks along dimension 0, rank 0's first",
    "g's backward must reduce-scatter once, with SUM: every rank used these tokens, so their gradients add up, and each rank wants "
    "its own tokens' share",
    "at the entry, once, so that this rank's weight meets all tokens",
)  # fmt: skip
G_BAR_OPERATOR = Operator(
    "g_bar", SHARE, JOINED,
    "g_bar's forward must reduce-scatter once, with SUM, and leaves this rank's tokens, which are contiguous, from r·s/t on",
    "g_bar's backward gathers: this rank's x went into all tokens, so it needs the gradients of all ranks",
    "right after the row-parallel product",
)  # fmt: skip
OPERATORS = (F_OPERATOR, F_BAR_OPERATOR, G_OPERATOR, G_BAR_OPERATOR)


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def exchange_of(made: Made, before: Tensor, after: Tensor) -> list[Collective]:
    """The collective of a pass that makes the one tensor of the other, none for what needs no other rank."""
    return [Collective(made.kind, max(size_of(before), size_of(after)))] if made.kind else []


def check_operator(b: Bench, right: Operator, parts: Parts, upstream: Parts) -> None:
    """Raise Wrong unless the learner's operator of that name does in both passes what ``right`` does.  parts: x by rank."""
    function, x = b[right.name], parts[b.rank]
    result, gradient = right.forward.make(parts, b.rank), right.backward.make(upstream, b.rank)
    passes = run_passes(
        b, function, {"x": x}, (b.group,), expected=result, upstream=upstream[b.rank],
        explain=lambda found: explain_exchange(found, parts, b.rank, right.forward, right.in_forward),
        exchanges=exchange_of(right.forward, x, result),
    )  # fmt: skip
    returned = _ran(passes.backward) if right.backward.kind else ""
    check_gradient(
        passes, "x", gradient, t=b.size,
        explain=lambda found: explain_exchange(found, upstream, b.rank, right.backward, right.in_backward, returned),
    )  # fmt: skip
    if b.size > 1:
        check_collectives("forward", passes.forward.collectives, exchange_of(right.forward, x, result))
        check_collectives("backward", passes.backward.collectives, exchange_of(right.backward, x, result))
    check_keeps(b, 0, "", lambda y: function(y, b.group), x, more="its backward needs no tensor of forward's")


def _ran(seen: Watch) -> str:
    """The collective of a pass in words, if it ran one that sums or joins; "" otherwise."""
    kinds = sorted({c.kind for c in seen.collectives} & {SUM.kind, JOINED.kind, SHARE.kind})
    return f"the {kinds[0]}" if len(kinds) == 1 else ""
