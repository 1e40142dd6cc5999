"""Observations: what a case (the function that tests an exercise) records on a rank, such as a result or saved bytes.

Each kind of observation has a class.  It decides whether the learner's observation is right, by comparing it with that
of our solution, and describes what is wrong with it.
"""

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

#: The name of the observation of a function's result, in a case with one result.
RESULT = "the result"


@dataclass
class RunOutcome:
    """The outcome of one run of a case (the function that tests an exercise) on all ranks.

    Attributes:
        seen: for each rank, its observations by name.
        errors: for each rank, the exception that ended its run, or None.
        remark: a text that the case returned, shown if the answer is right.
    """

    seen: list[dict[str, Observation]]
    errors: list[BaseException | None]
    remark: str = ""

    def values(self, name: str) -> list:
        """Return one observation's value on every rank; None for a rank whose run ended before it was recorded.

        Args:
            name: the observation's name.
        """
        return [of_rank[name].value if name in of_rank else None for of_rank in self.seen]


@dataclass(frozen=True)
class BesideOurs:
    """One observation on one rank, from the learner's run and from our solution's, with the other ranks' values.

    Attributes:
        found: the learner's run, with the observations of all ranks.
        right: the run of our solution, with the observations of all ranks.
        name: the observation's name.
        rank: the number of the rank whose observation it is, from 0.
    """

    found: RunOutcome
    right: RunOutcome
    name: str
    rank: int

    @property
    def own(self) -> Observation:
        """This rank's observation in the learner's run."""
        return self.found.seen[self.rank][self.name]

    @property
    def t(self) -> int:
        """How many ranks there are."""
        return len(self.found.seen)

    def everyone(self) -> list:
        """Return the observation's value on every rank in the learner's run."""
        return self.found.values(self.name)

    def rights(self) -> list:
        """Return the observation's value on every rank in our solution's run."""
        return self.right.values(self.name)


@dataclass
class Observation:
    """One thing that a case recorded on one rank.

    To judge a learner's observation, ``accepts`` and ``describe`` are called on our solution's observation of the same
    name.

    Attributes:
        name: the name of what was observed, as a message to the learner has it: "the gradient of x".
        value: the recorded value.
        repair: if it is wrong, what the learner should do.
        cause: if it is wrong, what may be the cause in the code.
    """

    name: str
    value: Any
    repair: str = ""
    cause: str = ""
    #: Whether it is a cost, which is right if it is no more than ours; anything else has one right value.
    is_cost: ClassVar[bool] = False
    #: Whether two runs that differ in it are taken to be different runs.
    tells_apart: ClassVar[bool] = True
    #: Whether the values of all ranks are needed to judge it.
    of_all_ranks: ClassVar[bool] = False

    def same_as(self, other: Observation | None) -> bool:
        """Return whether another run recorded the same value, be it right or wrong.

        Args:
            other: the other run's observation of the same name; None if that run has none.
        """
        return other is not None and type(self.value) is type(other.value) and bool(self.value == other.value)

    def accepts(self, both: BesideOurs) -> bool:
        """Return whether the learner's observation is right, compared with this observation, which is our solution's.

        Args:
            both: the learner's observation and ours on one rank, with those of the other ranks.
        """
        return bool(both.own.value == self.value)

    def describe(self, both: BesideOurs) -> list[Fault]:
        """Describe how the learner's observation is wrong, compared with this observation, which is our solution's.

        Args:
            both: the learner's observation and ours on one rank, with those of the other ranks.

        Returns: faults that may describe it, the likelier first.
        """
        raise NotImplementedError


@dataclass
class ValueSeen(Observation):
    """A number, a shape or a boolean that is right only if it equals our solution's.

    Attributes:
        meaning: for a number, the formula that gives it, as a text such as "34 · s · b · h"; "" if that isn't known.
    """

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
    """A value that is never judged wrong, such as an order of actions, because many orders are right.

    It is recorded because it helps to find out which of the expected mistakes the learner made.
    """

    def accepts(self, both: BesideOurs) -> bool:
        return True


@dataclass
class Cost(Observation):
    """A number that is right if it is no larger than our solution's.

    In ``words``, ``repair`` and ``cause``, "{found}" stands for the learner's number and "{enough}" for our solution's.

    Attributes:
        words: the message if the number is too large; "" stands for the observation's name.
        right: a text that is put before that message: what is right nevertheless, such as "the numbers are right".
    """

    is_cost, tells_apart = True, False
    words: str = ""
    right: str = "the numbers are right"

    def accepts(self, both: BesideOurs) -> bool:
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
    """What a function saves for backward; the value is a ``SavedBytes``.

    Attributes:
        what: the tensors that our solution saves, for the message: "x and 1/rms".
        element_size: bytes of an element of the function's input.
        spare: how many bytes more than our solution's are allowed.
    """

    is_cost, tells_apart = True, False
    what: str = ""
    element_size: int = 0
    spare: int = 0

    def same_as(self, other: Observation | None) -> bool:
        return other is not None and self.value.as_much() == other.value.as_much()

    def accepts(self, both: BesideOurs) -> bool:
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
    """The collectives that a forward or a backward pass ran.

    Attributes:
        in_backward: whether the collectives ran in the backward pass.
        result: the name of the collective whose result the pass probably returns ("the all-reduce"); "" if none.
        allowed_extra: collectives that the pass may run in addition to our solution's.
    """

    is_cost, tells_apart = True, False
    in_backward: bool = False
    result: str = ""
    allowed_extra: Sequence[Collective] = ()

    def accepts(self, both: BesideOurs) -> bool:
        return collectives_fault("", both.own.value, self.value, self.allowed_extra) is None

    def describe(self, both: BesideOurs) -> list[Fault]:
        finding = collectives_fault(self.name, both.own.value, self.value, self.allowed_extra)
        assert finding is not None
        return [finding]


@dataclass
class TensorSeen(Observation):
    """A tensor, which is right if it equals our solution's up to rounding.

    Attributes:
        advice_is_certain: whether ``repair`` and ``cause`` apply however the tensor is wrong.  If not, they are told
            only if the tensor's values support them.
        gradient_of: if the tensor is a gradient, the name of the input whose gradient it is; else "".
        parts: this rank's input (for a gradient, the gradient with which backward starts), if the function is a single
            collective, so that a wrong tensor can be explained as "the sum over the ranks" or the like; else None.
        missing: if the value is None where a gradient is expected, a text with the likely reason.
        backward: for a gradient, the name of the ``CollectivesRun`` of the same backward pass: if that pass ran other
            collectives than our solution's, they are the likely cause.
    """

    advice_is_certain: bool = True
    gradient_of: str = ""
    parts: Tensor | None = None
    missing: str = ""
    backward: str = ""
    tolerance: ClassVar[float] = ROUNDING

    def same_as(self, other: Observation | None) -> bool:
        x, y = self.value, None if other is None else other.value
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return other is not None and x is y  # None is not zero
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if not (x.isfinite().all() and y.isfinite().all()):
            return torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        if x.dtype != torch.float64 or self.equal(x, y):
            return self.equal(x, y) or close(x, y, 4 * torch.finfo(x.dtype).eps)
        # If one of the two runs computes in float32, the same mistake gives the same values up to its digits.
        in_single = [z.equal(z.float().double()) for z in (x, y)]
        return in_single[0] != in_single[1] and bool(x.any() and y.any()) and close(x, y, SINGLE_PRECISION)

    def equal(self, found: Tensor, right: Tensor) -> bool:
        """Return whether a tensor has the right values, up to rounding.

        The allowed difference is ``tolerance`` times the largest value of ``right``, and at least ``tolerance``.

        Args:
            found: a tensor of the right shape and dtype.
            right: the tensor of another run, which is taken to be right.
        """
        return close(found, right, self.tolerance)

    def accepts(self, both: BesideOurs) -> bool:
        a, b = both.own.value, self.value
        if a is None or b is None:
            return a is b
        return bool(a.dtype == b.dtype and a.shape == b.shape and self.equal(a, b))

    def describe(self, both: BesideOurs) -> list[Fault]:
        own, found, right = both.own, both.own.value, self.value
        assert isinstance(own, TensorSeen)
        if found is None:
            apart = any(value is not None for value in both.everyone())
            cause = "on other ranks it gets one, so the code depends on the rank" if apart else own.missing
            return [Fault(self._no_gradient, cause=cause, explains=True)]
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
        """Describe how a tensor of the right dtype differs from ours, in words that follow its name."""
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
        if not self.advice_is_certain and found.isfinite().all():
            return [Fault(finding.symptom, cause=cause)]
        return [Fault(finding.symptom, self.repair, cause or self.cause)]

    def nearly(self, found: Tensor, right: Tensor) -> Fault | None:
        """Return the fault that every wrong tensor of this class gets; None if the fault depends on the values.

        Only ``HalfTensor`` returns a fault: its tensors are rounded too much to explain their values.

        Args:
            found: the learner's tensor, which is wrong.
            right: our solution's tensor.
        """
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
        """Describe a tensor that can be made out of the tensors of all ranks: of their inputs if the function is an
        operator, else of their right values."""
        answer, rights = both.own.value, both.rights()
        if both.t == 1 or self.tolerance != ROUNDING:
            return []
        ratio = factor(answer, self.value) if answer.any() else None
        if answer.numel() < 2:  # any number is a multiple of another
            if ratio is None or not math.isclose(ratio, both.t) or not all(x.equal(self.value) for x in rights):
                return []
            cause = "every rank has the whole of it, and it is added up over the ranks"
            return [Fault(f"is {times(ratio, both.t)} what it should be", cause=cause, explains=True)]
        if self.parts is not None:
            return self._of_operator(both)
        if all(close(right, rights[0]) for right in rights if right.shape == rights[0].shape):
            return self._unsummed(both) or self._of_copies(both, ratio)
        if ratio is not None and is_mean(ratio, both_sizes(both) - {both.t}):
            cause = "is a mean taken where a sum belongs?"
            return [Fault(f"is {times(ratio)} what it should be", cause=cause, explains=True)]
        own = f"each rank's {self.gradient_of} is its own, so its gradient needs no collective"
        alone = own if self.gradient_of else "each rank has its own, so no collective comes after it"
        advice = Fault("", self.repair, self.cause or ("" if self.repair else alone))
        return explain_parts(answer, rights, both.rank, OWN_PART, advice)

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
        """Describe the case that every rank should have the sum of what the learner's ranks have."""
        everyone = both.everyone()
        if any(value is None or value.shape != self.value.shape for value in everyone):
            return []
        if not close(summed(everyone), self.value) or both.own.value.equal(self.value):
            return []
        return [Fault("is this rank's part alone; the sum over the ranks is missing", explains=True)]

    def _of_copies(self, both: BesideOurs, ratio: float | None) -> list[Fault]:
        """Describe a multiple of a tensor that should be the same on every rank."""
        if ratio is None or math.isclose(ratio, -1):
            return []
        cause = "every rank should have the same result"
        if self.gradient_of:
            cause = "it is added up over the ranks once too often"
        if math.isclose(ratio * both.t, 1):
            cause = "it should be the ranks' sum, not their mean"
        return [Fault(f"is {times(ratio, both.t)} what it should be", cause=cause, explains=True)]

    def _other_collectives(self, both: BesideOurs) -> str:
        """Say that forward runs other collectives than ours, which may explain a wrong result; "" if it doesn't."""
        ran, expected = (outcome.seen[both.rank].get("forward") for outcome in (both.found, both.right))
        if self.name != RESULT or ran is None or expected is None or text_of(ran.value) == text_of(expected.value):
            return ""
        return f"forward runs {text_of(ran.value)}; expected {text_of(expected.value)}"


class SingleTensor(TensorSeen):
    """A tensor that may be computed in float32.

    It may differ from our solution's by rounding in float32: by ``SINGLE_PRECISION`` of the largest value.
    """

    tolerance = SINGLE_PRECISION


class HalfTensor(TensorSeen):
    """A tensor in 16 bits: it may differ from our solution's by two bfloat16 roundings of the largest value."""

    def equal(self, found: Tensor, right: Tensor) -> bool:
        scale = right.double().abs().max().clamp_min(1e-300)
        two_roundings = 1.28 * torch.finfo(torch.bfloat16).eps
        return bool(found.isfinite().all()) and close(found.double() / scale, right.double() / scale, two_roundings)

    def nearly(self, found: Tensor, right: Tensor) -> Fault | None:
        return Fault("is not right in 16 bits; in float64 it is", self.repair, self.cause)


class SummedTensor(TensorSeen):
    """A tensor of which only the sum over the ranks must be right, not each rank's term of the sum."""

    of_all_ranks = True

    def accepts(self, both: BesideOurs) -> bool:
        if any(self.name not in of_rank for of_rank in both.found.seen):
            return True  # some rank's run ended before, for a reason that is reported instead
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
    """Return the numbers n for ``compare.difference``, where a wrong factor 1/n may come from a mean over n elements.

    They are sizes of dimensions, and products of them, of the tensors that our solution's run recorded on one rank.

    Args:
        both: an observation on this rank.
    """
    shapes = [seen.value.shape for seen in both.right.seen[both.rank].values() if isinstance(seen.value, Tensor)]
    return {n for shape in shapes for n in (*shape, math.prod(shape), math.prod(shape[:-1]))}


def differences(found: RunOutcome, right: RunOutcome) -> dict[str, list[int]]:
    """Compare a learner's run with our solution's, and find the observations that are wrong.

    Args:
        found: the learner's run.
        right: the run of our solution.

    Returns: for each wrong observation, by name, the numbers of the ranks on which it is wrong.  The names are in the
        order in which they were recorded, except that costs come after all others, and backward's collectives last.
    """
    wrong: dict[str, list[int]] = {}
    ours = {name: seen for of_rank in right.seen for name, seen in of_rank.items()}

    def late(name: str) -> int:
        seen = ours[name]
        if isinstance(seen, CollectivesRun):
            return 2 * seen.in_backward
        return int(seen.is_cost)

    for name in sorted(ours, key=late):
        pairs = [(k, BesideOurs(found, right, name, k)) for k, of_rank in enumerate(found.seen) if name in of_rank]
        if ranks := [k for k, both in pairs if not right.seen[k][name].accepts(both)]:
            wrong[name] = ranks
    return wrong


def first_finding(found: RunOutcome, right: RunOutcome, wrong: Mapping[str, list[int]]) -> Fault:
    """Return the fault of the first wrong observation; its symptom says on which ranks it is wrong.

    Args:
        found: the learner's run.
        right: the run of our solution.
        wrong: for each wrong observation, by name, the ranks on which it is wrong, from ``differences``.
    """
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
