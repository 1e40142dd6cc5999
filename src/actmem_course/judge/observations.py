"""What a rank sees while a case runs: each kind of observation says when it is right, and how it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, ClassVar

import torch
from torch import Tensor

from actmem.ledger.comms import Collective
from actmem_course.judge.collective_outcomes import OWN_PART, collectives_fault, explain_parts, made_of, text_of
from actmem_course.judge.compare import (
    ROUNDING,
    SINGLE_PRECISION,
    close,
    difference,
    dtype_name,
    factor,
    is_mean,
    summed,
    times,
)  # fmt: skip
from actmem_course.judge.meeting import list_of_ranks
from actmem_course.judge.saved_bytes import SavedBytes, needless, too_much
from actmem_course.judge.verdict import Fault

#: What functions' results are called, in a case of one result.
RESULT = "the result"


@dataclass
class RunOutcome:
    """By rank: what was seen, and the error that ended the run.  remark: what the case says of a right answer."""

    seen: list[dict[str, Observation]]
    errors: list[BaseException | None]
    remark: str = ""

    def values(self, name: str) -> list:
        """Every rank's; None where the run ended before."""
        return [own[name].value if name in own else None for own in self.seen]


@dataclass(frozen=True)
class BesideOurs:
    """One observation of a rank, in the learner's run (``found``) and in ours (``right``)."""

    found: RunOutcome
    right: RunOutcome
    name: str
    rank: int

    @property
    def own(self) -> Observation:
        return self.found.seen[self.rank][self.name]

    @property
    def t(self) -> int:
        return len(self.found.seen)

    def everyone(self) -> list:
        """Every rank's value."""
        return self.found.values(self.name)

    def rights(self) -> list:
        """Every rank's right value."""
        return self.right.values(self.name)


@dataclass
class Observation:
    """One thing that a rank saw; ``agrees`` and ``describe`` are asked of ours.  repair, cause: said where it is
    wrong."""

    name: str
    value: Any
    repair: str = ""
    cause: str = ""
    #: A cost is right if it is no more than ours; the rest has a right value.
    is_cost: ClassVar[bool] = False
    #: Whether two answers are the same only if this is.
    tells_apart: ClassVar[bool] = True
    #: Whether one rank alone can't judge it.
    of_all_ranks: ClassVar[bool] = False

    def same(self, other: Observation | None) -> bool:
        """Whether two runs saw the same, whatever is right."""
        return other is not None and type(self.value) is type(other.value) and bool(self.value == other.value)

    def agrees(self, both: BesideOurs) -> bool:
        """Whether a run that saw ``both.own`` is right."""
        return bool(both.own.value == self.value)

    def describe(self, both: BesideOurs) -> list[Fault]:
        """What can be said of one rank's wrong value, the likelier first."""
        raise NotImplementedError


@dataclass
class ValueSeen(Observation):
    """A number, a shape, a truth value: there is one right one.  meaning: what a number is made of."""

    meaning: str = ""

    def describe(self, both: BesideOurs) -> list[Fault]:
        own = both.own
        assert isinstance(own, ValueSeen)
        found, expected = (f"{x:,}" if type(x) is int else x for x in (own.value, self.value))
        if own.meaning and own.meaning != self.meaning:
            cause = f"expected {expected}, which is {self.meaning}"
            return [Fault(f"{self.name} is {found}, which is {own.meaning}", cause=cause)]
        return [Fault(f"{self.name} is {found}; expected {expected}", self.repair, self.cause)]


class Clue(Observation):
    """What is right in many ways, and tells one mistake from another."""

    def agrees(self, both: BesideOurs) -> bool:
        return True


@dataclass
class Cost(Observation):
    """A number that may be smaller than ours.  words: the symptom; in it and in the repair, {found} and {enough}.
    right: what is right nevertheless."""

    is_cost, tells_apart = True, False
    words: str = ""
    right: str = "the numbers are right"

    def agrees(self, both: BesideOurs) -> bool:
        return bool(both.own.value <= self.value)

    def describe(self, both: BesideOurs) -> list[Fault]:
        own, numbers = both.own, {"found": both.own.value, "enough": self.value}
        assert isinstance(own, Cost)
        many_ways = any(isinstance(seen, Clue) for seen in both.right.seen[both.rank].values())
        words = (own.words or own.name).format(**numbers)
        right = "" if many_ways else f"{own.right}, but "
        return [Fault(right + words, own.repair.format(**numbers), own.cause.format(**numbers))]


@dataclass
class SavedForBackward(Observation):
    """A ``SavedBytes``.  what: our bytes, in words.  element_size: of the input.  spare: so many bytes more are
    right, too."""

    is_cost, tells_apart = True, False
    what: str = ""
    element_size: int = 0
    spare: int = 0

    def same(self, other: Observation | None) -> bool:
        return other is not None and self.value.as_much() == other.value.as_much()

    def agrees(self, both: BesideOurs) -> bool:
        return too_much(both.own.value, self._enough, self.what, both.t) is None

    @property
    def _enough(self) -> int:
        return self.value.bytes + self.spare

    def describe(self, both: BesideOurs) -> list[Fault]:
        found: SavedBytes = both.own.value
        finding = too_much(found, self._enough, self.what, both.t)
        assert finding is not None
        if finding.repair:
            return [finding]
        why = needless(found, self.value, self.element_size, self.spare) or finding
        return [Fault(finding.symptom, self.repair or why.repair, why.cause)]


@dataclass
class CollectivesRun(Observation):
    """The collectives of a pass.  result: of which it may be; again: what backward may run besides."""

    is_cost, tells_apart = True, False
    in_backward: bool = False
    result: str = ""
    again: Sequence[Collective] = ()

    def agrees(self, both: BesideOurs) -> bool:
        return collectives_fault("", both.own.value, self.value, self.again) is None

    def describe(self, both: BesideOurs) -> list[Fault]:
        finding = collectives_fault(self.name, both.own.value, self.value, self.again)
        assert finding is not None
        return [finding]


@dataclass
class TensorSeen(Observation):
    """A tensor, right up to rounding.

    sure: cause and repair hold however it is wrong.  gradient_of: whose gradient it is.  parts: what this rank had
    before an operator.  missing: why a gradient isn't there.  backward: the name of what backward ran.
    """

    sure: bool = True
    gradient_of: str = ""
    parts: Tensor | None = None
    missing: str = ""
    backward: str = ""
    tolerance: ClassVar[float] = ROUNDING

    def same(self, other: Observation | None) -> bool:
        x, y = self.value, None if other is None else other.value
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return other is not None and x is y  # None is not zero
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if not (x.isfinite().all() and y.isfinite().all()):
            return torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        if x.dtype != torch.float64 or self.equal(x, y):
            return self.equal(x, y) or close(x, y, 4 * torch.finfo(x.dtype).eps)
        # Whoever computes in float32 makes the same mistakes, up to its digits.
        in_single = [z.equal(z.float().double()) for z in (x, y)]
        return in_single[0] != in_single[1] and bool(x.any() and y.any()) and close(x, y, SINGLE_PRECISION)

    def equal(self, found: Tensor, right: Tensor) -> bool:
        """Whether a tensor of the right shape and dtype is right."""
        return close(found, right, self.tolerance)

    def agrees(self, both: BesideOurs) -> bool:
        a, b = both.own.value, self.value
        if a is None or b is None:
            return a is b
        return bool(a.dtype == b.dtype and a.shape == b.shape and self.equal(a, b))

    def describe(self, both: BesideOurs) -> list[Fault]:
        own, found, right = both.own, both.own.value, self.value
        assert isinstance(own, TensorSeen)
        if found is None:
            return [Fault(self._no_gradient, cause=own.missing, explains=True)]
        if found.shape == right.shape and found.dtype != right.dtype:
            widened = found.dtype.itemsize > right.dtype.itemsize
            repair = "round once, at the end" if widened else "widen first, and don't round"
            if right.dtype == torch.float64:
                repair = "compute in the dtype of the input"
            return [Fault(f"{self.name} has dtype {dtype_name(found)}; expected {dtype_name(right)}", repair)]
        return [finding.after(f"{self._forward}{self.name} ") for finding in self._differences(both)]

    @property
    def _no_gradient(self) -> str:
        prefix = self.name.removesuffix(f"the gradient of {self.gradient_of}")
        return f"the forward is right, but {prefix}{self.gradient_of} gets no gradient"

    @property
    def _forward(self) -> str:
        return "the forward is right; " if self.gradient_of else ""

    def _differences(self, both: BesideOurs) -> list[Fault]:
        """How a tensor of the right dtype differs, to follow its name."""
        found, right = both.own.value, self.value
        if another := self._as_another(both):
            return [Fault(f"has the value of {another}", self.repair, self.cause)]
        if nearly := self.nearly(found, right):
            return [nearly]
        if made := self._of_parts(both):
            return made
        if right.dtype == torch.float64 and close(found, right, SINGLE_PRECISION):
            return [Fault("has the digits of float32", "compute in the dtype of the input")]
        finding = difference(found, right, both.t, both_sizes(both))
        cause = self._other_collectives(both) or finding.cause
        if not self.sure and found.isfinite().all():
            return [Fault(finding.symptom, cause=cause)]
        return [Fault(finding.symptom, self.repair, cause or self.cause)]

    def nearly(self, found: Tensor, right: Tensor) -> Fault | None:
        """What to say of a tensor that is right in some way."""
        return None

    def _as_another(self, both: BesideOurs) -> str:
        """The name of another result or gradient that this one equals; "" if there is none."""
        found: Tensor = both.own.value
        for name, seen in both.right.seen[both.rank].items():
            value = seen.value
            if name != self.name and isinstance(value, Tensor) and value.numel() > 1 and found.any():
                if close(found, value):
                    assert isinstance(seen, TensorSeen)
                    case = commonprefix((name, self.name)).rpartition(" ")[0]
                    return f"the gradient of {seen.gradient_of}" if seen.gradient_of else name[len(case) :].strip()
        return ""

    def _of_parts(self, both: BesideOurs) -> list[Fault]:
        """How it was made from the ranks' parts: from what they had before an operator, or from the right ones."""
        found, rights = both.own.value, both.rights()
        if both.t == 1 or self.tolerance != ROUNDING:
            return []
        ratio = factor(found, self.value) if found.any() else None
        if found.numel() < 2:  # any number is a multiple of another
            if ratio is None or not math.isclose(ratio, both.t) or not all(one.equal(self.value) for one in rights):
                return []
            cause = "every rank has the whole of it, and it is added up over the ranks"
            return [Fault(f"is {times(ratio, both.t)} what it should be", cause=cause, explains=True)]
        if self.parts is not None:
            return self._of_operator(both)
        if all(close(one, rights[0]) for one in rights if one.shape == rights[0].shape):
            return self._unsummed(both) or self._of_copies(both, ratio)
        if ratio is not None and is_mean(ratio, both_sizes(both) - {both.t}):
            cause = "is a mean taken where a sum belongs?"
            return [Fault(f"is {times(ratio)} what it should be", cause=cause, explains=True)]
        own = f"each rank's {self.gradient_of} is its own, so its gradient needs no collective"
        alone = own if self.gradient_of else "each rank has its own, so no collective comes after it"
        advice = Fault("", self.repair, self.cause or ("" if self.repair else alone))
        return explain_parts(found, rights, both.rank, OWN_PART, advice)

    def _of_operator(self, both: BesideOurs) -> list[Fault]:
        rights = [own[self.name] for own in both.right.seen]
        parts = [seen.parts for seen in rights if isinstance(seen, TensorSeen) and seen.parts is not None]
        ran = both.found.seen[both.rank].get(self.backward)
        should = next((made for _, made in made_of(self.value, parts, both.rank)), OWN_PART)
        result = ran.result if isinstance(ran, CollectivesRun) and should is not OWN_PART else ""
        advice = Fault("", self.repair, self.cause)
        if should is OWN_PART:
            should = replace(should, words="what this rank was given, unchanged")
        return explain_parts(both.own.value, parts, both.rank, should, advice, result)

    def _unsummed(self, both: BesideOurs) -> list[Fault]:
        """Every rank should have the sum of what each has."""
        everyone = both.everyone()
        if any(one is None or one.shape != self.value.shape for one in everyone):
            return []
        if not close(summed(everyone), self.value) or both.own.value.equal(self.value):
            return []
        return [Fault("is this rank's part alone; the sum over the ranks is missing", explains=True)]

    def _of_copies(self, both: BesideOurs, ratio: float | None) -> list[Fault]:
        """Every rank should have the same."""
        if ratio is None or math.isclose(ratio, -1):
            return []
        cause = "every rank should have the same result"
        if self.gradient_of:
            cause = "it is added up over the ranks once too often"
        if math.isclose(ratio * both.t, 1):
            cause = "it should be the ranks' sum, not their mean"
        return [Fault(f"is {times(ratio, both.t)} what it should be", cause=cause, explains=True)]

    def _other_collectives(self, both: BesideOurs) -> str:
        """Other collectives than ours, which may explain a result that nothing else does."""
        one, other = (outcome.seen[both.rank].get("forward") for outcome in (both.found, both.right))
        if self.name != RESULT or one is None or other is None or text_of(one.value) == text_of(other.value):
            return ""
        return f"forward runs {text_of(one.value)}; expected {text_of(other.value)}"


class SingleTensor(TensorSeen):
    """A tensor computed in float32, or in another of many right ways."""

    tolerance = SINGLE_PRECISION


class HalfTensor(TensorSeen):
    """A tensor of 16 bits, after two roundings, beside the largest value."""

    def equal(self, found: Tensor, right: Tensor) -> bool:
        scale = right.double().abs().max().clamp_min(1e-300)
        two_roundings = 1.28 * torch.finfo(torch.bfloat16).eps
        return bool(found.isfinite().all()) and close(found.double() / scale, right.double() / scale, two_roundings)

    def nearly(self, found: Tensor, right: Tensor) -> Fault | None:
        return Fault("is not right in 16 bits; in float64 it is", self.repair, self.cause)


class SummedTensor(TensorSeen):
    """Of which only the sum over the ranks has a right value."""

    of_all_ranks = True

    def agrees(self, both: BesideOurs) -> bool:
        if any(self.name not in own for own in both.found.seen):
            return True  # a rank has ended before, and says why
        everyone = both.everyone()
        return all(value is not None for value in everyone) and close(summed(everyone), summed(both.rights()))

    def describe(self, both: BesideOurs) -> list[Fault]:
        everyone, own = both.everyone(), both.own
        assert isinstance(own, TensorSeen)
        if any(value is None for value in everyone):
            return [Fault(self._no_gradient, cause=own.missing, explains=own.value is None)]
        finding = difference(summed(everyone), summed(both.rights()), both.t)
        return [finding.after(f"{self._forward}{self.name}, summed over the ranks, ")]


def both_sizes(both: BesideOurs) -> set[int]:
    """Over what a mean may be taken: dimensions of what a rank sees, and their products."""
    shapes = [seen.value.shape for seen in both.right.seen[both.rank].values() if isinstance(seen.value, Tensor)]
    return {n for shape in shapes for n in (*shape, math.prod(shape), math.prod(shape[:-1]))}


def differences(found: RunOutcome, right: RunOutcome) -> dict[str, list[int]]:
    """What is wrong, in the order in which it was seen, and on which ranks; costs and collectives of backward last."""
    wrong: dict[str, list[int]] = {}
    ours = {name: seen for own in right.seen for name, seen in own.items()}

    def late(name: str) -> int:
        seen = ours[name]
        if isinstance(seen, CollectivesRun):
            return 2 * seen.in_backward
        return int(seen.is_cost)

    for name in sorted(ours, key=late):
        pairs = [(k, BesideOurs(found, right, name, k)) for k, own in enumerate(found.seen) if name in own]
        if ranks := [k for k, both in pairs if not right.seen[k][name].agrees(both)]:
            wrong[name] = ranks
    return wrong


def first_finding(found: RunOutcome, right: RunOutcome, wrong: Mapping[str, list[int]]) -> Fault:
    """How the first thing that is wrong differs, on which ranks."""
    name, ranks = next(iter(wrong.items()))
    t, ours = len(found.seen), right.seen[ranks[0]][name]
    if ours.of_all_ranks:
        return ours.describe(BesideOurs(found, right, name, ranks[0]))[0]
    each = [right.seen[rank][name].describe(BesideOurs(found, right, name, rank)) for rank in ranks]
    common = next((finding for finding in each[0] if all(finding in other for other in each)), None)
    finding = common or each[0][0]
    if len(ranks) == t and common or finding.names_ranks and common:
        return finding
    where = "every rank" if len(ranks) == t else list_of_ranks(ranks)
    return finding.after(f"on {where}: " if common or len(ranks) == 1 else f"on {where}, here on rank {ranks[0]}: ")
