"""What can come of an exchange: operators over the ranks' parts, factors, roundings, each with its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from actmem.measure.comms import count_collectives
from actmem_course.judge.compare import close, factor, summed, times

_BIAS_COUNTS = (
    "without the bias",
    "with the bias",
    "with the bias t times",
    "with 1/t of the bias",
    "with the bias twice",
)


def combined(parts: Sequence[Tensor], rank: int) -> Iterator[tuple[str, Tensor]]:
    """What a learner may make of every rank's part, in words; the likelier first."""
    t, own, total = len(parts), parts[rank], summed(parts)
    yield "the sum of the ranks' parts", total
    yield "this rank's own part", own
    stacked = torch.stack(list(parts))
    yield "the largest of the ranks' parts (MAX)", stacked.amax(0)
    yield "the smallest of the ranks' parts (MIN)", stacked.amin(0)
    yield "the product of the ranks' parts (PRODUCT)", stacked.prod(0)
    for other in range(t):
        yield f"rank {other}'s part", parts[other]
    for dim in range(own.dim()):
        yield f"the ranks' parts joined along dimension {dim}", torch.cat(list(parts), dim)
        yield f"the ranks' parts joined along dimension {dim}, the last rank first", torch.cat(list(parts[::-1]), dim)
    for dim in range(own.dim()):
        if own.shape[dim] % t == 0:
            yield f"this rank's share of its own part, along dimension {dim}", own.chunk(t, dim)[rank]
            yield f"this rank's share of the sum, along dimension {dim}", total.chunk(t, dim)[rank]
            for other in range(t):
                if other != rank:
                    yield f"rank {other}'s share of the sum, along dimension {dim}", total.chunk(t, dim)[other]
            for name, value in (("largest", stacked.amax(0)), ("smallest", stacked.amin(0))):
                yield (
                    f"this rank's share of the {name} of the ranks' parts, along dimension {dim}",
                    value.chunk(t, dim)[rank],
                )


def explain_exchange(
    found: Tensor, expected: Tensor, parts: Sequence[Tensor], rank: int, remedy: str, ran: str = ""
) -> list[str]:
    """How ``found`` comes of the ranks' parts, in words; nothing if no operator makes it.

    remedy: what to do instead.  ran: the collective that the pass ran, if it ran one that sums or joins.
    """
    t, fits = len(parts), list[str]()
    if t == 1:
        return fits
    should = next((words for words, value in combined(parts, rank) if close(value, expected)), "")
    for words, value in combined(parts, rank):
        ratio = factor(found, value) if value.shape == found.shape else None
        if ratio is None or not value.any() or close(value * ratio, expected):
            continue
        what = f"{times(ratio, t)} {words}" if abs(ratio - 1) > 1e-9 else words
        should_be = f"; it should be {should}" if should else ""
        instead = f"{ran} ran, but what is returned is not its result" if ran and "own part" in words else remedy
        fits.append(f"is {what}{should_be}: {instead}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):  # each holds less than the next
        if (
            not fits
            and found.equal(found.to(dtype).to(found.dtype))
            and close(found, expected, 8 * t * torch.finfo(dtype).eps)
        ):
            name = str(dtype).removeprefix("torch.")
            fits.append(f"is right but for its digits, which are those of {name}: exchange it in the dtype that it has")
    return fits


def ran(seen: count_collectives) -> str:
    """The collective of a pass in words, if it ran one that sums or joins; "" otherwise."""
    kinds = [kind for kind in seen.counts if kind in ("all-reduce", "reduce-scatter", "all-gather")]
    return f"the {kinds[0]}" if len(kinds) == 1 else ""
