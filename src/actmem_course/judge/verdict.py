"""What the judge says about an exercise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

#: Not written, and waiting for another exercise; ended by another exercise, or in a file that can't be loaded.
PASSED, OPEN, BLOCKED, SKIPPED, WRONG, ERROR = "passed", "todo", "blocked", "not judged", "wrong", "error"


@dataclass(frozen=True)
class Fault:
    """What is wrong, in the order in which a learner hears of it.

    symptom: which result differs, how, and on which ranks.  cause: what in the code does that.  repair: what to do.
    names_ranks: the symptom says by itself which ranks it speaks of.  explains: nothing more is to be found out.
    """

    symptom: str
    repair: str = ""
    cause: str = ""
    names_ranks: bool = False
    explains: bool = False

    def after(self, words: str) -> Fault:
        """This, with words before the symptom."""
        return replace(self, symptom=words + self.symptom)


@dataclass(frozen=True)
class Verdict:
    """One exercise's outcome.

    status: passed, todo (not written), blocked (right once another exercise is), not judged, wrong (it runs and
    does something else), error (it raises).  diagnosis: what is wrong, in the learner's terms; on
    passed a remark or nothing.  where: file and line, if there is one.  cause, repair: see ``Fault``.
    """

    exercise: str
    function: str
    status: str
    diagnosis: str = ""
    where: str = ""
    cause: str = ""
    repair: str = ""

    @property
    def why(self) -> list[str]:
        """What a learner hears after the symptom, in that order."""
        labelled = (("why", self.cause), ("do", self.repair))
        return [f"{label}: {text}" for label, text in labelled if text]


def mend(repair: str, cause: str = "") -> Fault:
    """What is said of an observation that describes itself."""
    return Fault("", repair, cause)


class Wrong(Exception):
    """Raised by a check: the learner's code does something else than asked."""

    def __init__(self, symptom: str, repair: str = "", cause: str = ""):
        self.finding = Fault(clipped(symptom, 1000), repair, cause)  # it may quote what a learner's function returned
        super().__init__(self.finding.symptom)


def clipped(text: str, most: int = 200) -> str:
    """The first characters of a text, at most so many."""
    return text if len(text) <= most else text[: most - 1] + "…"


def refuse(faults: Iterable[tuple]) -> None:
    """Raise Wrong with the first symptom, and its repair if there is one, whose condition holds."""
    for holds, *words in faults:
        if holds:
            raise Wrong(*words)


class OutOfStep(Wrong):
    """The ranks are about to do different things.  Every rank finds the same message."""


class OtherGroup(Wrong):
    """A collective is about to run among other ranks than those of the group that the function was given."""

    def __init__(self, kind: str, where: str):
        call = f"{kind} ({where})" if where else kind
        super().__init__(
            f"{call} runs among ranks outside group", "pass group=group to every call of torch.distributed"
        )


class PeerStopped(BaseException):
    """Another rank has ended its judging, so this one cannot go on; the other has the reason."""


class Unlike(Exception):
    """This run does something else than the one that it is compared with, so nobody needs the rest of it."""
