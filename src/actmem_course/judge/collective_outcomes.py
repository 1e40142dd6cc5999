"""Explain wrong results of collectives: what combination of the ranks' tensors a result is, which collectives ran."""

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
    """One way in which a rank can combine the tensors of all ranks, such as their sum.

    Attributes:
        words: the combination's name, which can follow "the result is": "the sum over the ranks".
        make: takes the ranks' tensors and this rank's number; returns the combination.
        names_ranks: whether ``words`` names ranks, as "rank 0's part" does.
        unlikely: whether to prefer any other way that gives the same tensor.
    """

    words: str
    make: Callable[[Parts, int], Tensor]
    names_ranks: bool = False
    unlikely: bool = False


OWN_PART = Made("this rank's own part", lambda parts, rank: parts[rank])
SUM = Made("the sum over the ranks", lambda parts, rank: summed(parts))


def _share_of(whole: Made, dim: int = 0) -> Made:
    """This rank's t-th part of what ``whole`` makes."""
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
    """Yield the ways in which a learner's code may have combined the ranks' tensors.

    It may have reduced or concatenated them, and may have taken a shard of them or of the result.

    Args:
        parts: the tensors of all ranks, in rank order.
    """
    yield from _REDUCED
    yield from (_joined(), _share_of(SUM), _share_of(OWN_PART))
    yield Made("this rank's own part in its place, and zero in the others'", _alone)
    yield Made("this rank's own part t times, joined along dimension 0", lambda p, rank: torch.cat([p[rank]] * len(p)))
    t, all_equal = len(parts), all(part.equal(parts[0]) for part in parts)
    yield from (Made(f"rank {k}'s part", lambda p, rank, k=k: p[k], True) for k in range(t))  # type: ignore[misc]
    for k, end in combinations(range(t + 1), 2):
        if 1 < end - k < t and not all_equal:  # of equal parts it is a multiple of this rank's own part
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
        for result in (*_REDUCED, joined):
            yield _share_of(result, dim)
            yield _every_t_th(result, dim)


def _every_t_th(whole: Made, dim: int) -> Made:
    def make(parts: Parts, rank: int) -> Tensor:
        return whole.make(parts, rank).transpose(0, dim)[rank :: len(parts)].transpose(0, dim)

    return Made(f"every t-th of {whole.words}, along dimension {dim}", make, whole.names_ranks)


def made_of(found: Tensor, parts: Parts, rank: int) -> list[tuple[str, Made]]:
    """Find the combinations of the ranks' tensors that equal a tensor, up to a factor.

    Args:
        found: the learner's tensor.
        parts: the tensors of all ranks, in rank order.
        rank: the number of the rank that has ``found``.

    Returns: pairs, the likelier first, each of a text that names the combination with its factor ("twice the sum over
        the ranks"), and the combination.
    """
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
    """Describe a wrong tensor as a combination of the ranks' tensors.

    Args:
        found: the learner's tensor.
        parts: the tensors of all ranks, in rank order.
        rank: the number of the rank that has ``found``.
        right: the combination that the tensor should be.
        advice: a fault with the cause and the repair to report.
        ran: the name of the collective that the pass ran ("the all-reduce"), if the pass should return its result;
            else "".

    Returns: a fault for each combination that equals the tensor up to a factor, the likelier first.  The symptom
        continues a sentence that begins with the tensor's name: "is twice …".
    """
    should = f"it should be {right.words}"
    cause = f"{should}. {advice.cause[0].upper()}{advice.cause[1:]}" if advice.cause else should
    lost = Fault("", cause=f"{should}; {ran} ran, but what is returned is not its result", repair="return its result")
    faults = []
    for words, made in made_of(found, parts, rank):
        why = lost if ran and made is OWN_PART else Fault("", advice.repair, cause)
        faults.append(Fault(f"is {words}", why.repair, why.cause, names_ranks=made.names_ranks, explains=True))
    return faults


def collectives_fault(
    when: str, found: Sequence[Collective], wanted: Sequence[Collective], allowed_extra: Sequence[Collective] = ()
) -> Fault | None:
    """Compare the collectives of a pass with those of our solution.

    The order of the collectives doesn't matter.  A reduce-scatter and an all-gather of the same tensor count as one
    all-reduce.

    Args:
        when: the name of the pass, for the message: a text that ends with "forward" or "backward".
        found: the collectives that ran in the learner's pass.
        wanted: the collectives that ran in our solution's pass.
        allowed_extra: collectives that may run in addition to ``wanted``.

    Returns: a fault that says which collectives ran and which are enough; None if ``found`` is right.
    """
    if any(c.kind == "reduce-scatter" for c in wanted):
        # An all-to-all sends each share to its rank, which adds the shares up itself: as many bytes.
        found = [Collective("reduce-scatter", c.payload_bytes) if c.kind == "all-to-all" else c for c in found]
    else:
        found = _as_all_reduces(found)
    if sorted(map(str, found)) in (sorted(map(str, wanted)), sorted(map(str, [*wanted, *allowed_extra]))):
        return None
    # Forward's collectives are judged before the gradients, so only the result is known to be right then.
    right = "the result is right" if when.endswith("forward") else "the numbers are right"
    if sorted(c.kind for c in found) == sorted(c.kind for c in wanted):
        sent, enough = sum(c.payload_bytes for c in found), sum(c.payload_bytes for c in wanted)
        return Fault(f"{right}, but {when} sends {sent:,} B ({text_of(found)})", cause=f"{enough:,} B are enough")
    twice = {"all-reduce"} == {c.kind for c in found} and {"reduce-scatter"} == {c.kind for c in wanted}
    why = ", which sends half as much" if twice else ""
    return Fault(f"{right}, but {when} runs {text_of(found)}", cause=f"expected {text_of(wanted)}{why}")


def _as_all_reduces(collectives: Sequence[Collective]) -> list[Collective]:
    """Replace each pair of a reduce-scatter and an all-gather of the same size by the all-reduce that they make."""
    left = list(collectives)
    for scatter in [c for c in left if c.kind == "reduce-scatter"]:
        gather = Collective("all-gather", scatter.payload_bytes)
        if gather in left:
            left.remove(scatter)
            left.remove(gather)
            left.append(Collective("all-reduce", scatter.payload_bytes))
    return left


def text_of(collectives: Sequence[Collective]) -> str:
    """Return a text with the number of collectives of each kind: "1 all-gather, 2 all-reduces"."""
    kinds = sorted(c.kind for c in collectives)
    counts = {kind: kinds.count(kind) for kind in kinds}
    parts = [f"{n} {kind}" if n == 1 else f"{n} {kind}s" for kind, n in counts.items()]
    return ", ".join(parts) or "no collective"


def result_of(seen: Watch) -> str:
    """Return the name of the collective whose result a pass probably returns: "the all-reduce".

    Args:
        seen: the collectives that ran in the pass.

    Returns: the name; "" if the pass ran none of all-reduce, all-gather and reduce-scatter, or several of them.
    """
    kinds = sorted({c.kind for c in seen.collectives} & {"all-reduce", "all-gather", "reduce-scatter"})
    return f"the {kinds[0]}" if len(kinds) == 1 else ""


def assigned(seen: Watch) -> str:
    """Return a hint for a pass that ran a collective and whose result is None.

    The learner has probably written ``x = dist.all_reduce(x)``, but torch's collectives return None.

    Args:
        seen: the collectives that ran in the pass; the hint names the last of them.

    Returns: a question and its reason: "was the result of dist.all_reduce assigned? …".
    """
    name = f"dist.{seen.collectives[-1].kind.replace('-', '_')}"
    return f"was the result of {name} assigned? It writes into the tensor that it is given, and returns None"
