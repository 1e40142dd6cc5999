"""The four operators: what each pass makes of the ranks' parts, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actmem_course.judge.exchanged import JOINED, OWN_PART, SHARE, SUM, Made


@dataclass(frozen=True)
class Operator:
    """forward, backward: what each makes of the ranks' parts, and below what to do there and why."""

    name: str
    forward: Made
    backward: Made
    in_forward: str
    in_backward: str
    place: str


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
