"""What collectives give: everything that a rank may make of the ranks' parts, in words; what a pass may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from actmem.ledger.comms import Collective
from actmem_course.judge.compare import factor, summed, times
from actmem_course.judge.verdict import Fault
from actmem_course.judge.virtual import Watch

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Made:
    """make: a rank's tensor, from every rank's part and its number.  names_ranks: the words say which ranks' parts.

    unlikely: what anything else explains, where the ranks' parts are equal, is that rather.
    """

    words: str
    make: Callable[[Parts, int], Tensor]
    names_ranks: bool = False
    unlikely: bool = False


OWN_PART = Made("this rank's own part", lambda parts, rank: parts[rank])
SUM = Made("the sum over the ranks", lambda parts, rank: summed(parts))


def _share_of(whole: Made, dim: int = 0) -> Made:
    words = f"this rank's share of {whole.words}"
    if whole is OWN_PART:
        words = "this rank's share of its own tensor, not summed over the ranks"
    words += f", along dimension {dim}" if dim else ""
    return Made(
        words, lambda parts, rank: whole.make(parts, rank).tensor_split(len(parts), dim)[rank], whole.names_ranks
    )


def _joined(dim: int = 0) -> Made:
    return Made(f"the ranks' parts joined along dimension {dim}", lambda p, rank: torch.cat(list(p), dim))


def _alone(parts: Parts, rank: int) -> Tensor:
    return torch.cat([part if number == rank else torch.zeros_like(part) for number, part in enumerate(parts)])


_REDUCED = (
    OWN_PART,
    SUM,
    Made("the largest of the ranks' parts (MAX)", lambda parts, rank: torch.stack(list(parts)).amax(0)),
    Made("the smallest of the ranks' parts (MIN)", lambda parts, rank: torch.stack(list(parts)).amin(0)),
    Made("rank 0's part", lambda parts, rank: parts[0], names_ranks=True),
)


def everything_made(parts: Parts) -> Iterator[Made]:
    """All that a rank may make of the ranks' parts: reduced, joined, sharded, and all of these in turn."""
    yield from _REDUCED
    yield from (_joined(), _share_of(SUM), _share_of(OWN_PART))
    yield Made("this rank's own part in its place, and zero in the others'", _alone)
    yield Made("this rank's own part t times, joined along dimension 0", lambda p, rank: torch.cat([p[rank]] * len(p)))
    t, alike = len(parts), all(part.equal(parts[0]) for part in parts)
    yield from (Made(f"rank {k}'s part", lambda p, rank, k=k: p[k], True) for k in range(t))  # type: ignore[misc]
    for k, end in combinations(range(t + 1), 2):
        if 1 < end - k < t and not alike:  # where all have the same, it is a multiple of this rank's own part
            words = f"the sum of the parts of ranks {k} to {end - 1}"
            yield Made(words, lambda p, rank, k=k, end=end: summed(p[k:end]), True, True)  # type: ignore[misc]
    yield Made(
        "the ranks' parts joined along dimension 0, this rank's first",
        lambda p, rank: torch.cat([p[rank], *p[:rank], *p[rank + 1 :]]),
    )
    for dim in range(parts[0].dim()):
        joined = _joined(dim)
        yield joined
        yield Made(f"{joined.words}, the last rank first", lambda p, rank, of=joined: of.make(p[::-1], rank))  # type: ignore[misc]
        in_turn = f"the ranks' parts interleaved along dimension {dim}, one of each rank in turn"
        yield Made(in_turn, lambda p, rank, d=dim: torch.stack(list(p), d + 1).flatten(d, d + 1))  # type: ignore[misc]
        for whole in (*_REDUCED, joined):
            yield _share_of(whole, dim)
            yield _every_t_th(whole, dim)


def _every_t_th(whole: Made, dim: int) -> Made:
    def make(parts: Parts, rank: int) -> Tensor:
        return whole.make(parts, rank).transpose(0, dim)[rank :: len(parts)].transpose(0, dim)

    return Made(f"every t-th of {whole.words}, along dimension {dim}", make, whole.names_ranks)


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


def explain_parts(found: Tensor, parts: Parts, rank: int, right: Made, advice: Fault, ran: str = "") -> list[Fault]:
    """How ``found`` was made, to follow its name, the likelier first.

    right: what it should be.  advice: cause and repair.  ran: the collective that the pass ran, if it ran one that
    sums or joins.
    """
    should = f"it should be {right.words}"
    cause = f"{should}. {advice.cause[0].upper()}{advice.cause[1:]}" if advice.cause else should
    lost = Fault("", cause=f"{should}; {ran} ran, but what is returned is not its result", repair="return its result")
    fits = []
    for words, made in made_of(found, parts, rank):
        why = lost if ran and made is OWN_PART else Fault("", advice.repair, cause)
        fits.append(Fault(f"is {words}", why.repair, why.cause, names_ranks=made.names_ranks, explains=True))
    return fits


def collectives_fault(
    when: str, found: Sequence[Collective], wanted: Sequence[Collective], again: Sequence[Collective] = ()
) -> Fault | None:
    """What is wrong with the collectives of a pass; None if they are the ``wanted`` ones, in any order, or those and
    ``again``.

    A reduce-scatter and an all-gather of the same tensor stand for an all-reduce, which is made of them.
    """
    if any(c.kind == "reduce-scatter" for c in wanted):
        # Every rank's share to that rank, which adds them up itself: the same bytes.
        found = [Collective("reduce-scatter", c.payload_bytes) if c.kind == "all-to-all" else c for c in found]
    else:
        found = _as_all_reduces(found)
    if sorted(map(str, found)) in (sorted(map(str, wanted)), sorted(map(str, [*wanted, *again]))):
        return None
    right = "the result is right" if when.endswith("forward") else "the numbers are right"  # gradients come later
    if sorted(c.kind for c in found) == sorted(c.kind for c in wanted):
        sent, enough = sum(c.payload_bytes for c in found), sum(c.payload_bytes for c in wanted)
        return Fault(f"{right}, but {when} sends {sent:,} B ({text_of(found)})", cause=f"{enough:,} B are enough")
    twice = {"all-reduce"} == {c.kind for c in found} and {"reduce-scatter"} == {c.kind for c in wanted}
    why = ", which sends half as much" if twice else ""
    return Fault(f"{right}, but {when} runs {text_of(found)}", cause=f"expected {text_of(wanted)}{why}")


def _as_all_reduces(collectives: Sequence[Collective]) -> list[Collective]:
    """Pairs of a reduce-scatter and an all-gather of one size as the all-reduce that they are."""
    left = list(collectives)
    for scatter in [c for c in left if c.kind == "reduce-scatter"]:
        gather = Collective("all-gather", scatter.payload_bytes)
        if gather in left:
            left.remove(scatter)
            left.remove(gather)
            left.append(Collective("all-reduce", scatter.payload_bytes))
    return left


def text_of(collectives: Sequence[Collective]) -> str:
    """How many of each kind, in words."""
    kinds = sorted(c.kind for c in collectives)
    counts = {kind: kinds.count(kind) for kind in kinds}
    parts = [f"{n} {kind}" if n == 1 else f"{n} {kind}s" for kind, n in counts.items()]
    return ", ".join(parts) or "no collective"


def result_of(seen: Watch) -> str:
    """The collective of a pass in words, if it ran one that sums or joins; "" otherwise."""
    kinds = sorted({c.kind for c in seen.collectives} & {"all-reduce", "all-gather", "reduce-scatter"})
    return f"the {kinds[0]}" if len(kinds) == 1 else ""


def assigned(seen: Watch) -> str:
    """A guess at where a None comes from, of a pass that ran a collective."""
    name = f"dist.{seen.collectives[-1].kind.replace('-', '_')}"
    return f"was the result of {name} assigned? It writes into the tensor that it is given, and returns None"
