"""Judge the exercises of a learner's file on virtual ranks, and turn what happened on each rank into one verdict.

Virtual ranks are threads of one process. On each of them runs the exercise's case, the function that tests it.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.naming import ExerciseJudge
from actmem_course.judge.outline import solution_module
from actmem_course.judge.verdict import (
    BLOCKED,
    ERROR,
    OPEN,
    PASSED,
    WRONG,
    Fault,
    OtherGroup,
    OutOfStep,
    PeerStopped,
    Verdict,
    Wrong,
    clipped,
)
from actmem_course.judge.virtual import VirtualRank, VirtualRanks


class Judge:
    """Judges a learner's file on virtual ranks.

    Args:
        lab: the lab to which the file belongs.
        spaces: for each rank, the names that the file has defined there, with their values (the file runs once per
            rank).
        progress: called from time to time, so that the parent process knows that the judge is alive.

    Attributes:
        texts: the source text of each definition in the file, by its name.
        ranks: the virtual ranks.
        one: a single virtual rank, for exercises without collectives.
        passed: names of functions that have passed.
        endless: names of functions that ran too long in an earlier attempt.
    """

    def __init__(self, lab: Lab, spaces: list[dict], progress: Callable[[], None] = lambda: None):
        self.lab, self.spaces = lab, spaces
        self.texts: Mapping[str, str] = {}
        self.ranks = VirtualRanks(len(spaces), lab.one_process)
        self.one = VirtualRanks(1, lab.one_process)
        self.passed: set[str] = set()
        self.endless: set[str] = set()
        self._judged: set[str] = set()
        self._progress = progress

    @property
    def running(self) -> VirtualRank | None:
        """The virtual rank that is executing now; None if no case runs."""
        return self.one.running or self.ranks.running

    def judge(self, exercise: Exercise) -> Verdict:
        """Judge an exercise on all ranks.

        If its function calls functions of other exercises that haven't passed, our solution's functions run in their
        place, so that only mistakes of this exercise count.  If the exercise is right with them, its status is BLOCKED
        until the other exercises pass.
        """
        self._judged.add(exercise.number)
        for other in self._unproven(exercise):  # it may be right, and nobody asked for its verdict yet
            if other.number not in self._judged and other.function not in self.endless:
                self.judge(other)
        unproven = self._unproven(exercise)
        with self._ours({other.function for other in unproven}):
            verdict = self._once(exercise)
        if verdict.status != PASSED:
            self.passed.discard(exercise.function)  # several exercises may ask for one function
        elif not unproven:
            self.passed.add(exercise.function)
        else:
            names = " and ".join(f"{other.number} ({other.function})" for other in unproven)
            blocked = f"by {names}; passes once {'it is' if len(unproven) == 1 else 'they are'} right"
            return Verdict(exercise.number, exercise.function, BLOCKED, blocked)
        return verdict

    def know(self, exercise: Exercise, verdict: Verdict) -> None:
        """Accept an earlier verdict for an exercise whose source text hasn't changed, so that it isn't judged again.

        Args:
            exercise: the exercise, whose source text hasn't changed.
            verdict: the verdict that was given before.
        """
        self._judged.add(exercise.number)
        if verdict.status == PASSED:
            self.passed.add(exercise.function)

    def _unproven(self, exercise: Exercise) -> list[Exercise]:
        """List the other exercises whose functions this one's function uses, and that haven't passed."""
        right = {*self.passed, exercise.function}
        others = {e.function: e for e in self.lab.exercises if e.function not in right}
        space = self.spaces[0]
        return [others[name] for name in others if name in names_used_by(space.get(exercise.function), space, others)]

    def reads(self, exercise: Exercise) -> list[str]:
        """List the source texts on which a verdict depends.

        These are the texts of the exercise's function, and of all names of the file that this function uses.
        """
        names = self.spaces[0]
        used = {exercise.function, *names_used_by(names.get(exercise.function), names)}
        return [self.texts.get(name, "") for name in sorted(used)]

    def _once(self, exercise: Exercise) -> Verdict:
        """Run the case with the learner's functions on each group, and compare it with the run of ours."""
        judge = ExerciseJudge(exercise, self.ranks if exercise.takes_group else self.one, self._progress)
        remark = ""
        for group in judge.groups():
            learners = judge.run(self.spaces, group)
            outcomes = [outcome_of(exercise, self.spaces[k], k, error) for k, error in enumerate(learners.errors)]
            faults = [outcome for outcome in outcomes if outcome and outcome.status != PASSED]
            mistake = None
            if not any(outcome.everywhere or outcome.status == OPEN for outcome in faults):
                finding, mistake = judge.diagnosis(learners, group)
                if finding:
                    faults = [Outcome(0, WRONG, finding, everywhere=True)]
            if faults:
                verdict = verdict_of(exercise, faults if faults[0].everywhere else outcomes)
                if mistake:
                    verdict = replace(verdict, status=WRONG, cause=mistake.cause, repair=mistake.repair)
                outside = any(isinstance(error, OtherGroup) for error in learners.errors)
                if group and verdict.status != OPEN and not outside:
                    return verdict_with(exercise, WRONG, on_another_group(group, verdict), verdict.where)
                return verdict
            if None in outcomes:
                return verdict_of(exercise, outcomes)
            remark = remark or learners.remark
        return Verdict(exercise.number, exercise.function, PASSED, remark)

    @contextmanager
    def _ours(self, names: Iterable[str]) -> Iterator[None]:
        """Make a context in which our own functions of these names stand in place of the learner's."""
        solutions, before = vars(solution_module(self.lab.name)), [dict(space) for space in self.spaces]
        for space in self.spaces:
            space.update({name: solutions[name] for name in names})
        try:
            yield
        finally:
            for space, names_before in zip(self.spaces, before):
                space.clear()
                space.update(names_before)


def verdict_of(exercise: Exercise, found: Sequence[Outcome | None]) -> Verdict:
    """Combine the ranks' outcomes to one verdict.

    Args:
        exercise: the exercise that was judged.
        found: for each rank, how its run of the case ended; None for a rank that stopped because another rank did.
    """
    outcomes = [outcome for outcome in found if outcome is not None]
    worst = max(outcomes, key=lambda outcome: _RANKING.index(outcome.status), default=None)
    if worst is None or worst.status == PASSED and len(outcomes) < len(found):
        return Verdict(exercise.number, exercise.function, ERROR, "some ranks were left waiting for others")
    blamed = [outcome for outcome in outcomes if outcome.status == worst.status]
    finding = worst.finding
    if worst.status in (WRONG, ERROR) and 0 < len(blamed) < len(found) and not worst.everywhere:
        finding = finding.after(f"on rank {worst.rank}: ")
    return verdict_with(exercise, worst.status, finding, worst.where)


def verdict_with(exercise: Exercise, status: str, finding: Fault, where: str = "") -> Verdict:
    """Make an exercise's verdict, with the symptom, cause and repair of a fault as its explanation.

    Args:
        exercise: the exercise that was judged.
        status: PASSED, WRONG, ERROR or OPEN (not written yet).
        finding: the fault; an empty fault, ``Fault("")``, if the exercise has passed.
        where: file and line of the error, such as "lab2.py:30", or "".
    """
    return Verdict(exercise.number, exercise.function, status, finding.symptom, where, finding.cause, finding.repair)


_RANKING = (PASSED, WRONG, ERROR, OPEN)


@dataclass(frozen=True)
class Outcome:
    """How the run of a case ended on one rank.

    Attributes:
        rank: the rank's number.
        status: PASSED, WRONG, ERROR or OPEN.
        finding: the fault; an empty fault, ``Fault("")``, if the status is PASSED.
        where: file and line of the error, such as "lab2.py:30", or "".
        everywhere: whether the finding concerns all ranks, so that the message need not name this rank.
    """

    rank: int
    status: str
    finding: Fault = Fault("")
    where: str = ""
    everywhere: bool = False


def outcome_of(exercise: Exercise, functions: dict, rank: int, error: BaseException | None) -> Outcome | None:
    """Turn the exception that ended a rank's run into an outcome.

    Args:
        exercise: the exercise that was judged.
        functions: the names that the learner's file defines.
        rank: the rank's number.
        error: the exception; None if the run ended without one.

    Returns: the rank's outcome; None if the run stopped because another rank did.

    Raises: ``error`` itself if it is no Exception, SystemExit or PeerStopped.
    """
    if error is None:
        return Outcome(rank, PASSED)
    if isinstance(error, PeerStopped):
        return None
    if isinstance(error, Wrong):
        return Outcome(rank, WRONG, error.finding, everywhere=isinstance(error, OutOfStep))
    if isinstance(error, (Exception, SystemExit)):
        return _from_error(exercise, functions, rank, error)
    raise error


def on_another_group(name: str, verdict: Verdict) -> Fault:
    """Describe the fault of an answer that is right on the group of all ranks and wrong on a subgroup.

    Args:
        name: the subgroup's name, from ``name_of_subgroup``.
        verdict: the verdict of the run on the subgroup.
    """
    cause = "the number of ranks, the rank or a collective is that of all ranks, not of group"
    repair = (
        "take the number of ranks from dist.get_world_size(group) and the rank from dist.get_rank(group), and pass "
        "group=group to every collective"
    )
    if _NO_MEMBER in verdict.diagnosis:
        repair = "a source or destination counts among all ranks: dist.get_global_rank(group, 0) is the group's first"
    symptom = f"right with group=WORLD, but not on a group of {name}: there, {verdict.diagnosis}"
    there = ": ".join(filter(None, (verdict.cause, verdict.repair)))
    return Fault(symptom, repair, f"{cause}. There: {there}" if there else cause)


#: A part of torch's message about a source that isn't a rank of the group.
_NO_MEMBER = "not part of group"


def _from_error(exercise: Exercise, functions: dict, rank: int, error: BaseException) -> Outcome:
    frames = list(traceback.extract_tb(error.__traceback__))
    stack = [frame for frame in frames if frame.filename == functions.get("__file__")]
    where = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack and stack[-1].lineno else ""
    line = (stack[-1].line or "") if stack else ""
    # The line must raise it: torch raises NotImplementedError too, from C++ code that has no frame here.
    if isinstance(error, NotImplementedError) and stack and stack[-1] == frames[-1] and line.startswith("raise "):
        other = stack[-1].name
        text = "" if other == exercise.function else f"it calls {other}, which is not written yet"
        return Outcome(rank, OPEN, Fault(text), where)
    message = " ".join(str(error).split("\n\n")[0].split())
    for part, symptom in _AUTOGRAD.items():
        if part in message:
            left_out = re.search(r"\.(sum|mean)\(\)\.backward\(", line)
            cause = "the incoming gradient is left out" if left_out else f"torch: {clipped(message)}"
            repair = "torch.autograd.backward(y, grad) starts from it" if left_out else ""
            if shapes := re.search(r"at index (\d+) - got (\[.*?\]) but .* (\[.*?\])", message):
                cause = (
                    f"number {int(shapes[1]) + 1} of those it returns has shape {shapes[2]}, its argument {shapes[3]}"
                )
            return Outcome(rank, WRONG, Fault(symptom, repair, cause), where)
    of_arguments = re.search(r"\(\) (takes|missing|got an unexpected|got multiple)", message)
    if isinstance(error, TypeError) and not stack and of_arguments:
        words = f"the lab passes other arguments than this function takes: {clipped(message)}"
        return Outcome(rank, ERROR, Fault(words), where)
    # Without a line of the learner's on the stack, the case or backward's C++ code failed on what was returned.
    before = f"“{line}” raises " if stack else "what it returns cannot be used: "
    if len(stack) > 1:
        before = f"“{line}”, called in line {stack[-2].lineno}, raises "
    text = f"{type(error).__name__}: {clipped(message)}" if message else type(error).__name__
    by_name = "group stands where op belongs: pass group=group"
    repair = by_name if stack and "incompatible function arguments" in message else ""
    return Outcome(rank, ERROR, Fault(before + text, repair), where)


#: Messages that autograd raises from C++, with no line of the learner's on the stack, and the course's words for them.
_AUTOGRAD = {
    "returned an incorrect number of gradients": "backward must return one gradient for each argument of forward, None "
    "for what has none",
    "backward through the graph a second time": "the graph was freed before backward was done with it: something runs "
    "backward twice",
    "modified by an inplace operation": "a tensor that backward needs is changed in place after it was saved",
    "is a view and is being modified inplace": "the result of forward shares its storage with the input and is changed "
    "in place",
    "returned an invalid gradient": "backward returns a gradient of another shape than the argument has",
    "You must implement either the backward": "the torch.autograd.Function has a forward and no backward",
    "does not require grad and does not have a grad_fn": "backward starts from a result that has no graph: was it "
    "computed under no_grad? In a backward of your own all is, but for what runs under torch.enable_grad()",
}


def names_used_by(function: object, functions: dict, but_not: Container[str] = ()) -> set[str]:
    """List the names of the learner's file that a function uses, directly or through other functions of the file.

    Args:
        function: a function or a class of the file, or any other object, which uses no names.
        functions: the names that the learner's file defines, with their values.
        but_not: names that are listed, but whose own definitions are not searched for further names.
    """
    used: set[str] = set()
    pending = [function]
    while pending:
        for name in _names_in(pending.pop()):
            if name not in used and (name in functions or name in but_not):
                used.add(name)
                if name not in but_not:
                    pending.append(functions[name])
    return used


def _names_in(item: object) -> Iterator[str]:
    """Yield the global names that occur in the code of a function, or of a class's methods."""
    if isinstance(item, type):
        for member in vars(item).values():
            if not isinstance(member, type):
                yield from _names_in(member)
        return
    code = getattr(getattr(item, "__func__", item), "__code__", None)
    pending = [code] if code else []
    while pending:
        code = pending.pop()
        yield from code.co_names
        pending.extend(constant for constant in code.co_consts if hasattr(constant, "co_names"))
