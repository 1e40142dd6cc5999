"""Judge one exercise: run its case with the learner's code and with ours, compare, and name the mistake.

A case is the function that tests an exercise. It records observations, such as results and saved bytes. A stated
mistake is one that we expect learners to make; it is written as edits of our solution. It explains a learner's run if
our solution, so edited, gives the same observations as the learner's code on every rank.
"""

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

#: Runs of our own solutions, by exercise, number of ranks and group.
_OURS: dict[tuple, RunOutcome] = {}


class ExerciseJudge:
    """Judges one exercise on virtual ranks.

    Args:
        exercise: the exercise to judge.
        ranks: the virtual ranks on which its case runs.
        progress: called after each stated mistake that was tried, so that the parent process knows that the judge is
            alive.
    """

    def __init__(self, exercise: Exercise, ranks: VirtualRanks, progress: Callable[[], None]):
        self.exercise, self.ranks, self.progress = exercise, ranks, progress
        self.module = solution_module(lab_of(exercise).name)

    def groups(self) -> list[str]:
        """Return the names of the process groups on which the case runs: "" for the group of all ranks.

        If the exercise's function takes a group, there is a second name, from ``name_of_subgroup``.
        """
        return ["", name_of_subgroup(self.ranks.size)] if self.exercise.takes_group and self.ranks.size > 1 else [""]

    def ours(self, group: str) -> RunOutcome:
        """Run the case with our own solution; a second call for the same group returns the first call's outcome.

        Args:
            group: the group's name, one of ``groups()``.
        """
        key = self.exercise.number, self.ranks.size, group
        if key not in _OURS:
            outcome = self.run([vars(self.module)] * self.ranks.size, group)
            for error in outcome.errors:
                if error is not None:
                    raise error
            _OURS[key] = outcome
        return _OURS[key]

    def run(self, spaces: list[dict], group: str, reference: RunOutcome | None = None) -> RunOutcome:
        """Run the case on every rank of a group.

        Args:
            spaces: for each rank, the names that the judged file defines, with their values.
            group: the group's name, one of ``groups()``.
            reference: another run of the case; a rank stops as soon as one of its observations differs from the
                observation of that name in ``reference``.

        Returns: the observations and the exception of each rank.
        """
        runs: list[CaseRun | None] = [None] * self.ranks.size

        def job(rank: VirtualRank) -> Any:
            seen = reference.seen[rank.number] if reference else None
            run = CaseRun(spaces[rank.number], rank, group, reference=seen)
            runs[rank.number] = run
            return case_of(self.exercise)(run)

        results = self.ranks.run(job, spaces[0].get("__file__", ""))
        errors = [result if isinstance(result, BaseException) else None for result in results]
        remark = next((result for result in results if isinstance(result, str)), "")
        return RunOutcome([run.seen if run else {} for run in runs], errors, remark)

    def diagnosis(self, learners: RunOutcome, group: str) -> tuple[Fault | None, Mistake | None]:
        """Find out what is wrong with the learner's run, by comparison with the run of our solution.

        Args:
            learners: the learner's run of the case on this group.
            group: the group's name, one of ``groups()``.

        Returns: the fault, or None if every observation is right; and the stated mistake (one that we expect, and can
            make in our solution) that explains the run, or None.
        """
        # A run that saw nothing, only raised, has nothing that could be compared with ours.
        ours = self.ours(group) if any(learners.seen) else learners
        wrong = differences(learners, ours)
        if not wrong:
            if group or not any(learners.errors):
                return None, None
            return None, self.matching_mistakes(learners, (), group)[0]
        finding = first_finding(learners, ours, wrong)
        full_match, first_match = self.matching_mistakes(learners, list(wrong), group)
        costs = ours.seen[0][next(iter(wrong))].is_cost
        mistake = full_match or (None if finding.explains and not costs else first_match)
        if mistake:
            finding = replace(finding, cause=mistake.cause, repair=mistake.repair)
        return finding, mistake

    def matching_mistakes(
        self, learners: RunOutcome, wrong: Sequence[str], group: str
    ) -> tuple[Mistake | None, Mistake | None]:
        """Find the mistake that the learner probably made: apply each stated mistake to our solution, and run the case.

        Args:
            learners: the learner's run.
            wrong: names of the observations that differ from our solution's, in the order of ``differences``; empty if
                the run only raised an exception.
            group: the group of that run, one of ``groups()``.

        Returns: (mistake, None) with the first mistake whose run has the same observations and errors as the learner's,
            or the same wrong costs if only costs are wrong.  If there is no such mistake: (None, mistake) with the
            first mistake that gives the same wrong value of the observation ``wrong[0]``; else (None, None).
        """
        first_match: Mistake | None = None
        solution = inspect.getsource(self.module)
        for mistake in mistakes_of(self.exercise):
            for source in mistake.sources(solution):
                names = names_of(source, self.module.__file__ or "")
                if names is None:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's, of what an edit of ours does
                    edited = self.run([names] * self.ranks.size, group, learners)
                self.progress()
                same_run, same_first = self._match(edited, learners, wrong, group)
                if same_run:
                    return mistake, None
                first_match = first_match or (mistake if same_first else None)
        return None, first_match

    def _match(self, edited: RunOutcome, learners: RunOutcome, wrong: Sequence[str], group: str) -> tuple[bool, bool]:
        """Whether an edited solution's run does all that the learner's does, and whether it does up to ``wrong[0]``.

        If only costs are wrong (bytes, collectives), the same costs must be wrong, and by as much.  If the first wrong
        observation is a whole number, that it is the same can be chance.
        """
        ours = self.ours(group) if wrong else learners
        if wrong and ours.seen[0][wrong[0]].is_cost:  # the numbers are right, and need not be rounded the same
            same_costs = [_same_observation(edited, learners, name) for name in wrong]
            further_costs = set(differences(edited, ours)) - set(wrong)
            same_first = same_costs[0] and not further_costs and _same_run(edited, learners, Clue)
            return same_first and all(same_costs), same_first
        same_run = _same_run(edited, learners)
        if not wrong:
            return same_run, False
        name = wrong[0]
        same_first = _same_observation(edited, learners, name) and not isinstance(learners.values(name)[0], int)
        # The edit must make this observation wrong too: an answer that is nearly right is like our own solution there.
        counts = (same_run or same_first) and name in differences(edited, ours)
        return (same_run, same_first) if counts and not _saves_more(edited, learners, ours) else (False, False)


def _saves_more(edited: RunOutcome, learners: RunOutcome, ours: RunOutcome) -> bool:
    """Whether the edited solution saves needless bytes for backward where the learner's answer doesn't."""
    of_edited, of_learners = (
        {name for name in differences(run, ours) if isinstance(ours.seen[0][name], SavedForBackward)}
        for run in (edited, learners)
    )
    return bool(of_edited - of_learners)


def _same_observation(run: RunOutcome, other_run: RunOutcome, name: str) -> bool:
    """Whether every rank of two runs saw the same under this name."""
    return all(name in a and a[name].same_as(b.get(name)) for a, b in zip(run.seen, other_run.seen))


def _same_run(run: RunOutcome, other_run: RunOutcome, kind: type[Observation] = Observation) -> bool:
    """Whether two runs saw and raised the same on every rank, right or wrong.

    Args:
        run: ended by ``Unlike`` if it was compared with the other.
        other_run: the run that it is compared with.
        kind: the kind of observations that are compared, of those whose ``tells_apart`` is true.
    """
    if any(isinstance(error, Unlike) for error in run.errors):
        return False
    if list(map(_signature, run.errors)) != list(map(_signature, other_run.errors)):
        return False
    for a, b in zip(run.seen, other_run.seen):
        for name in a.keys() | b.keys():
            seen = a.get(name) or b[name]
            if isinstance(seen, kind) and seen.tells_apart:
                if name not in a or not a[name].same_as(b.get(name)):
                    return False
    return True


def _signature(error: BaseException | None) -> tuple[str, str]:
    return type(error).__name__, "" if isinstance(error, PeerStopped) else str(error)
