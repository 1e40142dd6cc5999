"""The loop: each exercise in order, on all ranks, to one verdict."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from actmem_course.judge.catalogue import solutions_of
from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.verdict import (
    ERROR,
    OPEN,
    PASSED,
    WRONG,
    OtherGroup,
    OutOfStep,
    PeerStopped,
    Verdict,
    Wrong,
)
from actmem_course.judge.workbench import Bench
from actmem_course.messages import message
from actmem_course.rank_store import RanksLost


def judge(
    lab: Lab,
    exercises: Iterable[Exercise],
    b: Bench,
    on_start: Callable[[Exercise], None] = lambda exercise: None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    passed: set[str] | None = None,
) -> list[Verdict]:
    """Verdicts of ``exercises`` in order; every rank gets the same.  passed: functions known to be right, added to.

    An exercise that fails is tried again with our own functions in place of the others that have
    not passed: what then passes only waits for them, and what fails is to blame itself.
    """
    verdicts: list[Verdict] = []
    passed = set() if passed is None else passed
    for exercise in exercises:
        on_start(exercise)
        verdict = judge_one(exercise, b)
        if verdict.status == PASSED:
            passed.add(exercise.function)
        else:
            passed.discard(exercise.function)  # several exercises may ask for one function
            verdict = _tried_again(lab, exercise, b, verdict, passed)
        verdicts.append(verdict)
        on_verdict(verdict)
    return verdicts


def _tried_again(lab: Lab, exercise: Exercise, b: Bench, first: Verdict, passed: set[str]) -> Verdict:
    others = {e.function: e.number for e in lab.exercises if e.function not in passed | {exercise.function}}
    used = names_used_by(b.functions.get(exercise.function), b.functions, others) & set(others)
    if not used:
        return first
    with _ours(lab, used, b.functions):
        second = judge_one(exercise, b)
    if second.status == PASSED:
        names = " and ".join(f"{others[name]} ({name})" for name in sorted(used, key=lambda name: others[name]))
        are = "it is" if len(used) == 1 else "they are"
        return replace(first, status=OPEN, diagnosis=f"blocked by {names}; passes once {are} right", where="")
    return second


def judge_one(exercise: Exercise, b: Bench) -> Verdict:
    """Run one check on every rank, and make one verdict of what the ranks found."""
    b.start()
    own = _outcome(exercise, b)
    b.in_step.stop()
    outcomes = [outcome for outcome in b.store.gather(own) if outcome is not None]
    worst = max(outcomes, key=lambda outcome: _RANKING.index(outcome.status), default=None)
    if worst is None:
        return Verdict(exercise.number, exercise.function, ERROR, "every rank was waiting for another")
    blamed = [outcome for outcome in outcomes if outcome.status == worst.status]
    diagnosis = worst.diagnosis
    if any(outcome.others for outcome in blamed):  # what fits on every rank is likelier than what fits on one
        everywhere = [{outcome.diagnosis, *outcome.others} for outcome in blamed]
        diagnosis = next(
            (fit for fit in (diagnosis, *worst.others) if all(fit in fits for fits in everywhere)), diagnosis
        )
    if worst.status in (WRONG, ERROR) and 0 < len(blamed) < b.size and not worst.everywhere:
        diagnosis = f"on rank {worst.rank}: {diagnosis}"
    return Verdict(exercise.number, exercise.function, worst.status, diagnosis, worst.where)


_RANKING = (PASSED, WRONG, ERROR, OPEN)


@message
@dataclass(frozen=True)
class _Outcome:
    """What one rank found.  everywhere: the diagnosis speaks of all ranks already."""

    rank: int
    status: str
    diagnosis: str = ""
    where: str = ""
    everywhere: bool = False
    others: list[str] = field(default_factory=list)


def _outcome(exercise: Exercise, b: Bench) -> _Outcome | None:
    """This rank's finding; None if it stopped because another rank did."""
    try:
        remark = exercise.check(b)
        if exercise.takes_group:
            _check_subgroups(exercise, b)
        return _Outcome(b.rank, PASSED, remark or "")
    except PeerStopped:
        return None
    except RanksLost:
        raise
    except OutOfStep as wrong:
        return _Outcome(b.rank, WRONG, str(wrong), everywhere=True)
    except Wrong as wrong:
        return _Outcome(b.rank, WRONG, str(wrong), others=wrong.others)
    except (Exception, SystemExit) as error:
        return _from_error(exercise, b, error)


def _check_subgroups(exercise: Exercise, b: Bench) -> None:
    """Raise Wrong unless what is right on all ranks is right on groups that are not all ranks in their order."""
    for other in b.subgroups():
        try:
            exercise.check(other)
        except (PeerStopped, RanksLost, OutOfStep, OtherGroup):
            raise
        except Exception as error:
            found = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {_short(str(error), 120)}"
            if "not part of group" in found:
                found += ". A source or destination counts among all ranks: dist.get_global_rank(group, 0) is the group's first"
            raise Wrong(
                f"right with group=WORLD, but not on a group of {other.group_name}: take the number of ranks from "
                "dist.get_world_size(group) and the rank from dist.get_rank(group), and pass group=group to every collective. "
                f"There, {found}"
            ) from None


def _from_error(exercise: Exercise, b: Bench, error: BaseException) -> _Outcome:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.filename == b.place.file]
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
        return _Outcome(b.rank, OPEN, text, where)
    message = _OF_GLOO.sub("", " ".join(str(error).split("\n\n")[0].split()))
    for part, diagnosis in _AUTOGRAD.items():
        if part in message:
            return _Outcome(b.rank, WRONG, f"{diagnosis} (torch: {_short(message)})", where)
    if (
        isinstance(error, TypeError)
        and not own
        and re.search(r"\(\) (takes|missing|got an unexpected|got multiple)", message)
    ):
        return _Outcome(
            b.rank,
            ERROR,
            f"its parameters are not those that the lab passes, in this order: {_short(message)}",
            where,
        )
    # Nothing of the learner's on the stack: the check stumbles over what came back, or backward's C++ side does.
    line = f"“{own[-1].line}” raises " if own else "what it returns cannot be used: "
    return _Outcome(b.rank, ERROR, f"{line}{type(error).__name__}{message and ': '}{_short(message)}", where)


#: What autograd says from C++, where no line of the learner's is on the stack, in the course's words.
_AUTOGRAD = {
    "returned an incorrect number of gradients": "backward must return one gradient for each argument of forward, None for what has none",
    "backward through the graph a second time": "the graph was freed before backward was done with it: something runs backward twice",
    "modified by an inplace operation": "a tensor that backward needs is changed in place after it was saved",
    "is a view and is being modified inplace": "the result of forward shares its storage with the input and is changed in place",
    "returned an invalid gradient": "backward returns a gradient of another shape than the argument has",
    "You must implement either the backward": "the torch.autograd.Function has a forward and no backward",
    "does not require grad and does not have a grad_fn": "backward runs on a result that has no graph: was it computed under no_grad?",
}
#: Where in its source gloo stopped, and when: nothing for a learner.
_OF_GLOO = re.compile(r"\[rank\d+\]:\[.*?\] ")


def _short(message: str, limit: int = 200) -> str:
    return message if len(message) <= limit else message[: limit - 1] + "…"


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


@contextmanager
def _ours(lab: Lab, names: Iterable[str], functions: dict) -> Iterator[None]:
    """Put our own functions in place of the learner's while the block runs."""
    solutions = solutions_of(lab.name)
    before = {name: functions[name] for name in names}
    functions.update({name: solutions[name] for name in names})
    try:
        yield
    finally:
        functions.update(before)
