"""The possible results of an exchange: everything that one rank may make from every rank's part, in words; and the four operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from actmem_course.judge.compare import close, factor, summed, times

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Made:
    """make: a rank's tensor, from every rank's part and its number.  kind: the collective that it takes, "" if none.

    unlikely: what anything else explains, where the ranks' parts are equal, is that rather.
    """

    words: str
    make: Callable[[Parts, int], Tensor]
    kind: str = ""
    unlikely: bool = False

    def scaled(self, ratio: float, t: int) -> Made:
        """This, times a number."""
        if ratio == 1:
            return self
        return Made(f"{times(ratio, t)} {self.words}", lambda parts, rank: ratio * self.make(parts, rank))


OWN_PART = Made("this rank's own part", lambda parts, rank: parts[rank])
SUM = Made("the sum over the ranks", lambda parts, rank: summed(parts), "all-reduce")


def _share_of(whole: Made, dim: int = 0, of: int | None = None, kind: str = "") -> Made:
    """One rank's contiguous share.  of: whose; None: this rank's."""
    words = f"{'this rank' if of is None else f'rank {of}'}'s share of {'its own part' if whole is OWN_PART else whole.words}"
    words += f", along dimension {dim}" if dim else ""
    return Made(words, lambda p, rank: whole.make(p, rank).tensor_split(len(p), dim)[rank if of is None else of], kind)


def _joined(dim: int = 0, kind: str = "") -> Made:
    return Made(f"the ranks' parts joined along dimension {dim}", lambda p, rank: torch.cat(list(p), dim), kind)


JOINED, SHARE = _joined(kind="all-gather"), _share_of(SUM, kind="reduce-scatter")


def _alone(parts: Parts, rank: int) -> Tensor:
    return torch.cat([part if number == rank else torch.zeros_like(part) for number, part in enumerate(parts)])


#: What stands for a pass of an operator by mistake, the likelier first.
USUAL = (
    OWN_PART,
    SUM,
    Made("the largest of the ranks' parts (MAX)", lambda p, rank: torch.stack(list(p)).amax(0)),
    Made("the smallest of the ranks' parts (MIN)", lambda p, rank: torch.stack(list(p)).amin(0)),
    Made("rank 0's part", lambda p, rank: p[0]),
    JOINED,
    SHARE,
    _share_of(OWN_PART),
    Made("this rank's own part in its place, and zero in the others'", _alone),
    Made("this rank's own part t times, joined along dimension 0", lambda p, rank: torch.cat([p[rank]] * len(p))),
)


def everything_made(parts: Parts) -> Iterator[Made]:
    """All that a rank may make of the ranks' parts: reduced, joined, cut, and all of these in turn."""
    yield from USUAL
    t, dims, alike = len(parts), parts[0].dim(), all(part.equal(parts[0]) for part in parts)
    wholes = [
        *USUAL[1:4],
        OWN_PART,
        Made("the product of the ranks' parts (PRODUCT)", lambda p, rank: torch.stack(list(p)).prod(0)),
    ]
    others = [Made(f"rank {k}'s part", lambda p, rank, k=k: p[k]) for k in range(t)]  # type: ignore[misc]
    yield from (*wholes, *others)
    for k, end in combinations(range(t + 1), 2):
        if 1 < end - k < t and not alike:  # where all have the same, it is a multiple of this rank's own part
            words = f"the sum of the parts of ranks {k} to {end - 1}"
            yield Made(words, lambda p, rank, k=k, end=end: summed(p[k:end]), unlikely=True)  # type: ignore[misc]
    yield Made("the ranks' parts stacked in a new dimension", lambda p, rank: torch.stack(list(p)))
    yield Made(
        "the ranks' parts joined along dimension 0, this rank's first",
        lambda p, rank: torch.cat([p[rank], *p[:rank], *p[rank + 1 :]]),
    )
    for dim in range(dims):
        yield _joined(dim)
        in_turn = f"the ranks' parts interleaved along dimension {dim}, one of each rank in turn"
        yield Made(
            f"{_joined(dim).words}, the last rank first",
            lambda p, rank, d=dim: torch.cat(list(p[::-1]), d),  # type: ignore[misc]
        )
        yield Made(in_turn, lambda p, rank, d=dim: torch.stack(list(p), d + 1).flatten(d, d + 1))  # type: ignore[misc]
        for whole in (*wholes, *others, _joined(dim)):
            yield _share_of(whole, dim)
            yield from (_share_of(whole, dim, of) for of in range(t))
            yield Made(
                f"every t-th of {whole.words}, along dimension {dim}",
                lambda p, rank, w=whole, d=dim: w.make(p, rank).transpose(0, d)[rank :: len(p)].transpose(0, d),  # type: ignore[misc]
            )


def made_of(found: Tensor, parts: Parts, rank: int) -> list[tuple[str, Made]]:
    """How ``found`` was made from the ranks' parts, in words, the likelier first; nothing if no operator makes it."""
    same, scaled = dict[str, Made](), dict[str, Made]()
    if len(parts) == 1 or found.numel() < 2 or not found.isfinite().all():
        return []
    for made in everything_made(parts):
        value = made.make(parts, rank)
        ratio = factor(found, value) if value.shape == found.shape else None
        if ratio and abs(ratio - 1) < 1e-9:
            same[made.words] = made
        elif ratio:
            scaled[f"{times(ratio, len(parts))} {made.words}"] = made
    return sorted([*same.items(), *scaled.items()], key=lambda pair: pair[1].unlikely)


def explain_exchange(found: Tensor, parts: Parts, rank: int, right: Made, remedy: str, ran: str = "") -> list[str]:
    """The same in sentences, with what it should be.

    right: what it should be.  remedy: what to do.  ran: the collective that the pass ran, if it ran one that sums or joins.
    """
    returned = f"{ran} ran, but what is returned is not its result"
    fits = [
        f"is {words}; it should be {right.words}: {returned if ran and made is OWN_PART else remedy}"
        for words, made in made_of(found, parts, rank)
    ]
    expected = right.make(parts, rank)
    if fits or found.shape != expected.shape:
        return fits
    for dtype in (torch.bfloat16, torch.float16, torch.float32):  # each holds less than the next
        rounded = found.equal(found.to(dtype).to(found.dtype))
        if rounded and close(found, expected, 8 * len(parts) * torch.finfo(dtype).eps):
            name = str(dtype).removeprefix("torch.")
            return [f"is right but for its digits, which are those of {name}: exchange it in the dtype that it has"]
    return []


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
    "f's forward must return x as it is, because every rank has the same x already",
    "f's backward must all-reduce once, with SUM. Each rank's gradient comes from its own slice of the weight, and these add up",
    "at the entry, once",
)  # fmt: skip
F_BAR_OPERATOR = Operator(
    "f_bar", SUM, OWN_PART,
    "f_bar's forward must all-reduce once, with SUM. The ranks' x are the terms of a sum",
    "f_bar's backward must pass the gradient on unchanged, without an all-reduce. After the sum every rank runs the same code, so "
    "each has the whole gradient already",
    "right after the row-parallel product",
)  # fmt: skip
G_OPERATOR = Operator(
    "g", JOINED, SHARE,
    "g's forward gathers the tokens of all ranks along dimension 0, rank 0's first",
    "g's backward must reduce-scatter once, with SUM. Every rank used all tokens, so their gradients add up, and each rank needs "
    "those of its own tokens",
    "at the entry, once, so that this rank's weight meets all tokens",
)  # fmt: skip
G_BAR_OPERATOR = Operator(
    "g_bar", SHARE, JOINED,
    "g_bar's forward must reduce-scatter once, with SUM. Each rank gets its own tokens, s/t of them, from r·s/t on",
    "g_bar's backward must all-gather. This rank's x went into all tokens, so it needs the gradients of all ranks",
    "right after the row-parallel product",
)  # fmt: skip
OPERATORS = (F_OPERATOR, F_BAR_OPERATOR, G_OPERATOR, G_BAR_OPERATOR)


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()
