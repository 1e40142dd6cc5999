"""The loop: each exercise in order, on all ranks, to one verdict."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from actmem_course.judge.naming import Naming, check_case
from actmem_course.judge.outline import Exercise, Lab, solutions_of
from actmem_course.judge.verdict import (
    BLOCKED,
    ERROR,
    OPEN,
    PASSED,
    WRONG,
    OtherGroup,
    OutOfStep,
    PeerStopped,
    Verdict,
    Wrong,
    clipped,
)
from actmem_course.judge.virtual import VirtualRank, VirtualRanks
from actmem_course.judge.workbench import Bench


class Judge:
    """Judges a learner's file on virtual ranks.

    spaces: the names of the learner's file, for each rank its own.  texts: the text of each, if all that the file reads is in it.
    passed: functions known to be right.  restore: undoes what a learner's code did to torch, before ours runs.  unwanted: whether
    nobody waits for verdicts any more; then ``judge`` raises Unwanted.  waiting: what passes with functions of ours in place of
    the learner's, for the judges of later saves.
    """

    def __init__(
        self,
        lab: Lab,
        spaces: list[dict],
        device: str = "cpu",
        progress: Callable[..., None] = lambda text="": None,
        restore: Callable[[], None] = lambda: None,
        unwanted: Callable[[], bool] = lambda: False,
        waiting: set[tuple] | None = None,
    ):
        self.lab, self.spaces = lab, spaces
        self.texts: Mapping[str, str] = {}
        self.ranks = VirtualRanks(len(spaces), device, lab.one_process, unwanted)
        #: For a case of one rank's own: what exchanges nothing needs no others.
        self.one = VirtualRanks(1, device, lab.one_process, unwanted)
        self.passed: set[str] = set()
        self._progress, self._restore = progress, restore
        self._waiting = set() if waiting is None else waiting

    @property
    def running(self) -> VirtualRank | None:
        """The rank whose turn it is."""
        return self.one.running or self.ranks.running

    def judge(self, exercise: Exercise) -> Verdict:
        """The verdict of all ranks.

        An exercise that fails is tried again with our own functions in place of the others that have
        not passed: what then passes only waits for them, and what fails is to blame itself.
        """
        others = {
            e.function: e.number for e in self.lab.exercises if e.function not in {*self.passed, exercise.function}
        }
        space = self.spaces[0]
        used = names_used_by(space.get(exercise.function), space, others) & set(others)
        verdict = self._once(exercise, named=not used)
        if verdict.status == PASSED:
            self.passed.add(exercise.function)
            return verdict
        self.passed.discard(exercise.function)  # several exercises may ask for one function
        if not used:
            return verdict
        key = exercise.number, len(self.spaces), *sorted(used), *self.reads(exercise, used)
        if not self.texts or key not in self._waiting:
            with self._ours(used):
                second = self._once(exercise)
            if second.status != PASSED:
                return second
            if self.texts:
                self._waiting.add(key)
        names = " and ".join(f"{others[name]} ({name})" for name in sorted(used, key=lambda name: others[name]))
        are = "it is" if len(used) == 1 else "they are"
        return replace(verdict, status=BLOCKED, diagnosis=f"by {names}; passes once {are} right", where="")

    def reads(self, exercise: Exercise, but_not: Container[str] = ()) -> list[str]:
        """The text of an exercise's function, and of everything of the file that it uses.  but_not: names that aren't looked into."""
        names = self.spaces[0]
        used = sorted({exercise.function, *names_used_by(names.get(exercise.function), names, but_not)})
        return [self.texts.get(name, "") for name in used if name not in but_not]

    def _once(self, exercise: Exercise, named: bool = True) -> Verdict:
        """The case with the learner's functions, beside the case with ours.  named: look for what is wrong, if something is."""
        naming = Naming(
            exercise, self.ranks if exercise.takes_group or exercise.all_ranks else self.one, self._progress
        )
        remark = ""
        for group, name in naming.groups().items():
            found = naming.run(self.spaces, group)
            self._restore()
            outcomes = [self._outcome(exercise, rank, error) for rank, error in enumerate(found.errors)]
            faults = [outcome for outcome in outcomes if outcome and outcome.status != PASSED]
            if not named:
                if not faults and naming.differs(found, group):
                    faults = [Outcome(0, WRONG, everywhere=True)]
            elif not any(outcome.everywhere or outcome.status == OPEN for outcome in faults):
                if diagnosis := naming.diagnosis(found, group):
                    faults = [Outcome(0, WRONG, diagnosis, everywhere=True)]
            if faults:
                verdict = verdict_of(exercise, faults if faults[0].everywhere else outcomes)
                if name and verdict.status != OPEN and "outside group" not in verdict.diagnosis:
                    return replace(verdict, status=WRONG, diagnosis=on_another_group(name, verdict.diagnosis))
                return verdict
            if None in outcomes:
                return verdict_of(exercise, outcomes)
            remark = remark or found.remark
        return Verdict(exercise.number, exercise.function, PASSED, remark)

    def _outcome(self, exercise: Exercise, rank: int, error: BaseException | None) -> Outcome | None:
        """What an error that ended a run means; None if another rank's did."""
        if error is None:
            return Outcome(rank, PASSED)
        return outcome_of_error(exercise, self.spaces[rank], rank, error)

    @contextmanager
    def _ours(self, names: Iterable[str]) -> Iterator[None]:
        """Put our own functions in place of the learner's while the block runs."""
        solutions, before = solutions_of(self.lab.name), [dict(space) for space in self.spaces]
        for space in self.spaces:
            space.update({name: solutions[name] for name in names})
        try:
            yield
        finally:
            for space, names_before in zip(self.spaces, before):
                space.update(names_before)


def verdict_of(exercise: Exercise, found: Sequence[Outcome | None]) -> Verdict:
    """One verdict of what each rank found; None if it stopped because another did."""
    outcomes = [outcome for outcome in found if outcome is not None]
    worst = max(outcomes, key=lambda outcome: _RANKING.index(outcome.status), default=None)
    if worst is None or worst.status == PASSED and len(outcomes) < len(found):
        return Verdict(exercise.number, exercise.function, ERROR, "some ranks were left waiting for others")
    blamed = [outcome for outcome in outcomes if outcome.status == worst.status]
    diagnosis = worst.diagnosis
    if worst.status in (WRONG, ERROR) and 0 < len(blamed) < len(found) and not worst.everywhere:
        diagnosis = f"on rank {worst.rank}: {diagnosis}"
    return Verdict(exercise.number, exercise.function, worst.status, diagnosis, worst.where)


_RANKING = (PASSED, WRONG, ERROR, OPEN)


@dataclass(frozen=True)
class Outcome:
    """What one rank found.  everywhere: the diagnosis speaks of all ranks already."""

    rank: int
    status: str
    diagnosis: str = ""
    where: str = ""
    everywhere: bool = False


def outcome_of(exercise: Exercise, b: Bench) -> Outcome | None:
    """This rank's finding, where ranks are processes; None if it stopped because another rank did."""
    try:
        remark = check_case(exercise, b)
        for other in b.subgroups() if exercise.takes_group else ():
            try:
                check_case(exercise, other)
            except (OutOfStep, OtherGroup):
                raise
            except Exception as error:
                found = (
                    str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {clipped(str(error), 120)}"
                )
                raise Wrong(on_another_group(other.group_name, found)) from None
        return Outcome(b.rank, PASSED, remark or "")
    except (Exception, SystemExit, PeerStopped) as error:
        return outcome_of_error(exercise, b.functions, b.rank, error)


def outcome_of_error(exercise: Exercise, functions: dict, rank: int, error: BaseException) -> Outcome | None:
    """What an exception says of a rank's answer; None if it stopped because another rank did."""
    if isinstance(error, PeerStopped):
        return None
    if isinstance(error, OutOfStep):
        return Outcome(rank, WRONG, str(error), everywhere=True)
    if isinstance(error, Wrong):
        return Outcome(rank, WRONG, str(error))
    if isinstance(error, (Exception, SystemExit)):
        return _from_error(exercise, functions, rank, error)
    raise error


def on_another_group(name: str, found: str) -> str:
    """The diagnosis of what is right on all ranks in their order, and was ``found`` to be wrong on others."""
    if "not part of group" in found:
        found += ". A source or destination counts among all ranks: dist.get_global_rank(group, 0) is the group's first"
    return (
        f"right with group=WORLD, but not on a group of {name}: take the number of ranks from "
        "dist.get_world_size(group) and the rank from dist.get_rank(group), and pass group=group to every collective. "
        f"There, {found}"
    )


def _from_error(exercise: Exercise, functions: dict, rank: int, error: BaseException) -> Outcome:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.filename == functions.get("__file__")]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    # By the line, because torch raises NotImplementedError too, from code that has no frame.
    if (
        isinstance(error, NotImplementedError)
        and own
        and own[-1] == frames[-1]
        and (own[-1].line or "").startswith("raise ")
    ):
        other = own[-1].name
        text = "" if other == exercise.function else f"it calls {other}, which is not written yet"
        return Outcome(rank, OPEN, text, where)
    message = _OF_GLOO.sub("", " ".join(str(error).split("\n\n")[0].split()))
    for part, diagnosis in _AUTOGRAD.items():
        if part in message:
            summed = own and re.search(r"\.(sum|mean)\(\)\.backward\(", own[-1].line or "")
            if summed:
                diagnosis += ". And the incoming gradient is left out: torch.autograd.backward(y, grad) starts from it"
            return Outcome(rank, WRONG, f"{diagnosis} (torch: {clipped(message)})", where)
    if (
        isinstance(error, TypeError)
        and not own
        and re.search(r"\(\) (takes|missing|got an unexpected|got multiple)", message)
    ):
        return Outcome(
            rank, ERROR, f"the lab passes other arguments than this function takes: {clipped(message)}", where
        )
    # Nothing of the learner's on the stack: the check stumbles over what came back, or backward's C++ side does.
    line = f"“{own[-1].line}” raises " if own else "what it returns cannot be used: "
    return Outcome(rank, ERROR, f"{line}{type(error).__name__}{message and ': '}{clipped(message)}", where)


#: What autograd says from C++, where no line of the learner's is on the stack, in the course's words.
_AUTOGRAD = {
    "returned an incorrect number of gradients": "backward must return one gradient for each argument of forward, None for what has none",
    "backward through the graph a second time": "the graph was freed before backward was done with it: something runs backward twice",
    "modified by an inplace operation": "a tensor that backward needs is changed in place after it was saved",
    "is a view and is being modified inplace": "the result of forward shares its storage with the input and is changed in place",
    "returned an invalid gradient": "backward returns a gradient of another shape than the argument has",
    "You must implement either the backward": "the torch.autograd.Function has a forward and no backward",
    "does not require grad and does not have a grad_fn": "backward starts from a result that has no graph: was it computed under no_grad? In a backward of your own all is, but for what runs under torch.enable_grad()",
}
#: Where in its source gloo stopped, and when: nothing for a learner.
_OF_GLOO = re.compile(r"\[rank\d+\]:\[.*?\] ")


def names_used_by(function: object, functions: dict, but_not: Container[str] = ()) -> set[str]:
    """All names of the learner's file that a function uses, directly or not.  but_not: names that are not looked into."""
    used: set[str] = set()
    pending = [function]
    while pending:
        for name in _names_in(pending.pop()):
            if name in functions and name not in used:
                used.add(name)
                pending += [functions[name]] * (name not in but_not)
    return used


def _names_in(item: object) -> Iterator[str]:
    """Global names that the code of a function, or of a class's methods, mentions."""
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
