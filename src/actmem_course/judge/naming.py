"""Which stated mistake does what the learner's answer does?"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from actmem_course.judge.case import CaseRun, name_of_subgroup
from actmem_course.judge.exercise import Exercise, Mistake, names_of
from actmem_course.judge.observations import (
    Clue,
    Observation,
    RunOutcome,
    SavedForBackward,
    differences,
    first_finding,
)  # fmt: skip
from actmem_course.judge.outline import case_of, lab_of, mistakes_of, solution_module
from actmem_course.judge.verdict import Fault, PeerStopped, Unlike
from actmem_course.judge.virtual import VirtualRank, VirtualRanks

#: What our own answers do, by exercise, number of ranks and group.
_OURS: dict[tuple, RunOutcome] = {}


class Naming:
    """Judges one exercise on virtual ranks.  progress: called while mistakes are tried."""

    def __init__(self, exercise: Exercise, ranks: VirtualRanks, progress: Callable[[], None]):
        self.exercise, self.ranks, self.progress = exercise, ranks, progress
        self.module = solution_module(lab_of(exercise).name)

    def groups(self) -> list[str]:
        """On which groups the case runs, by their names: "" is all ranks in their order."""
        return ["", name_of_subgroup(self.ranks.size)] if self.exercise.takes_group and self.ranks.size > 1 else [""]

    def ours(self, group: str) -> RunOutcome:
        """What our own answer does."""
        key = self.exercise.number, self.ranks.size, group
        if key not in _OURS:
            outcome = self.run([vars(self.module)] * self.ranks.size, group)
            for error in outcome.errors:
                if error is not None:
                    raise error
            _OURS[key] = outcome
        return _OURS[key]

    def run(self, spaces: list[dict], group: str, like: RunOutcome | None = None) -> RunOutcome:
        """The case on every rank of a group.  like: what it is compared with; the run ends where it does something
        else."""
        runs: list[CaseRun | None] = [None] * self.ranks.size

        def job(rank: VirtualRank) -> Any:
            seen = like.seen[rank.number] if like else None
            run = CaseRun(spaces[rank.number], rank, group, like=seen)
            runs[rank.number] = run
            return case_of(self.exercise)(run)

        said = self.ranks.run(job, spaces[0].get("__file__", ""))
        errors = [one if isinstance(one, BaseException) else None for one in said]
        remark = next((one for one in said if isinstance(one, str)), "")
        return RunOutcome([run.seen if run else {} for run in runs], errors, remark)

    def diagnosis(self, found: RunOutcome, group: str) -> tuple[Fault | None, Mistake | None]:
        """What is wrong with what was seen, and which mistake does the same."""
        right = self.ours(group) if any(found.seen) else found  # what only raises has nothing to compare
        wrong = differences(found, right)
        if not wrong:
            if group or not any(found.errors):
                return None, None
            return None, self.mistake_like(found, (), group)[0]
        finding = first_finding(found, right, wrong)
        whole, part = self.mistake_like(found, list(wrong), group)
        costs = right.seen[0][next(iter(wrong))].is_cost
        mistake = whole or (None if finding.explains and not costs else part)
        if mistake:
            finding = replace(finding, cause=mistake.cause, repair=mistake.repair)
        return finding, mistake

    def mistake_like(
        self, found: RunOutcome, wrong: Sequence[str], group: str
    ) -> tuple[Mistake | None, Mistake | None]:
        """The first mistake that does all that the learner's does; and the first that does so up to what is wrong
        first."""
        partly: Mistake | None = None
        solution = inspect.getsource(self.module)
        for mistake in mistakes_of(self.exercise):
            for source in mistake.sources(solution):
                names = names_of(source, self.module.__file__ or "")
                if names is None:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's, of what an edit of ours does
                    outcome = self.run([names] * self.ranks.size, group, found)
                self.progress()
                whole, enough = self._alike(outcome, found, wrong, group)
                if whole:
                    return mistake, None
                partly = partly or (mistake if enough else None)
        return None, partly

    def _alike(self, outcome: RunOutcome, found: RunOutcome, wrong: Sequence[str], group: str) -> tuple[bool, bool]:
        """Whether a mistake's run does all that the learner's does, and whether it does up to what is wrong first.

        Where the numbers are right, all that is wrong costs the same.  A whole number may be the same by chance.
        """
        ours = self.ours(group) if wrong else found
        if wrong and ours.seen[0][wrong[0]].is_cost:  # right numbers may be rounded otherwise
            there = [_same_there(outcome, found, name) for name in wrong]
            more = set(differences(outcome, ours)) - set(wrong)
            enough = there[0] and not more and _same(outcome, found, Clue)
            return enough and all(there), enough
        whole = _same(outcome, found)
        if not wrong:
            return whole, False
        first = wrong[0]
        enough = _same_there(outcome, found, first) and not isinstance(found.values(first)[0], int)
        # An edit that changes nothing there is like an answer that is nearly right.
        differs = (whole or enough) and first in differences(outcome, ours) and not _costs_more(outcome, found, ours)
        return whole and differs, enough and differs


def _costs_more(one: RunOutcome, other: RunOutcome, ours: RunOutcome) -> bool:
    """Whether only the one run saves for backward what nothing needs."""
    more, also = (
        {name for name in differences(run, ours) if isinstance(ours.seen[0][name], SavedForBackward)}
        for run in (one, other)
    )
    return bool(more - also)


def _same_there(one: RunOutcome, other: RunOutcome, name: str) -> bool:
    """Whether all ranks of two runs saw the same of one thing."""
    return all(name in a and a[name].same(b.get(name)) for a, b in zip(one.seen, other.seen))


def _same(one: RunOutcome, other: RunOutcome, kind: type[Observation] = Observation) -> bool:
    """Whether two runs did the same on every rank, whatever is right and costs.  kind: in what is compared so."""
    if any(isinstance(error, Unlike) for error in one.errors):
        return False
    if list(map(_signature, one.errors)) != list(map(_signature, other.errors)):
        return False
    for a, b in zip(one.seen, other.seen):
        for name in a.keys() | b.keys():
            seen = a.get(name) or b[name]
            if isinstance(seen, kind) and seen.tells_apart:
                if name not in a or not a[name].same(b.get(name)):
                    return False
    return True


def _signature(error: BaseException | None) -> tuple[str, str]:
    return type(error).__name__, "" if isinstance(error, PeerStopped) else str(error)
