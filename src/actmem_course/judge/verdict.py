"""``Verdict``, the judge's answer for an exercise; ``Fault``, what is wrong; and the exceptions that end a case.

A case is the function that tests an exercise. The symptom is what the learner sees to be wrong, such as a result; the
cause is what in the code leads to it; the repair is what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

#: What an exercise can be.  OPEN: it isn't written yet.  BLOCKED: it is right, but uses another exercise that isn't.
#: SKIPPED: it can't be judged, because loading the file fails or ends the process.  WRONG: it runs and does something
#: else.  ERROR: it raises an exception.
PASSED, OPEN, BLOCKED, SKIPPED, WRONG, ERROR = "passed", "todo", "blocked", "not judged", "wrong", "error"


@dataclass(frozen=True)
class Fault:
    """What is wrong with an answer.  A learner is told the symptom first, then the cause, then the repair.

    Attributes:
        symptom: which result differs, and how.
        repair: what the learner should do.
        cause: what in the learner's code leads to the symptom.
        names_ranks: whether the symptom says by itself on which ranks it is seen.  If not, the judge puts them before
            it.
        explains: whether the symptom is enough to see the mistake.  The judge then adds the cause and repair of a
            ``Mistake`` that we expect from learners only if our solution with that mistake gives all the same
            observations as the learner's code.  Otherwise the same first wrong observation is enough.
    """

    symptom: str
    repair: str = ""
    cause: str = ""
    names_ranks: bool = False
    explains: bool = False

    def after(self, words: str) -> Fault:
        """Return a copy of this fault with ``words`` put before the symptom."""
        return replace(self, symptom=words + self.symptom)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one exercise.

    Attributes:
        exercise: the exercise's number, such as "2.1".
        function: the name of the exercise's function.
        status: PASSED, OPEN, BLOCKED, SKIPPED, WRONG or ERROR.
        diagnosis: the symptom, a text that the learner reads; if the exercise has passed, a remark or "".
        where: file and line of the error, such as "lab2.py:30", or "".
        cause: what in the learner's code leads to the symptom.
        repair: what the learner should do.
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
        """The lines that a learner can be told after the symptom: "why: " with the cause, "do: " with the repair."""
        labelled = (("why", self.cause), ("do", self.repair))
        return [f"{label}: {text}" for label, text in labelled if text]


def mend(repair: str, cause: str = "") -> Fault:
    """Make a fault without a symptom, as advice for an observation, which finds the symptom by itself.

    Args:
        repair: what the learner should do.
        cause: what in the learner's code may lead to the symptom.
    """
    return Fault("", repair, cause)


class Wrong(Exception):
    """Raised by a check if the learner's code does not do what the exercise asks for.

    Args:
        symptom: what is wrong; the judge cuts it to 1,000 characters.
        repair: what the learner should do.
        cause: what in the learner's code leads to the symptom.

    Attributes:
        finding: these three as a ``Fault``.
    """

    def __init__(self, symptom: str, repair: str = "", cause: str = ""):
        self.finding = Fault(clipped(symptom, 1000), repair, cause)  # it may quote what a learner's function returned
        super().__init__(self.finding.symptom)


def clipped(text: str, most: int = 200) -> str:
    """Return a text cut to at most ``most`` characters, with "…" at the end if anything is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def refuse(faults: Iterable[tuple]) -> None:
    """Raise Wrong for the first fault whose condition is true; do nothing if no condition is.

    Args:
        faults: tuples ``(condition, symptom[, repair[, cause]])``, where the texts are those of ``Wrong``.
    """
    for condition, *words in faults:
        if condition:
            raise Wrong(*words)


class OutOfStep(Wrong):
    """The ranks' collectives don't match, so real ranks would hang.  Every rank raises it, with the same message."""


class OtherGroup(Wrong):
    """A collective would run on another process group than the one that the function was given.

    Args:
        kind: the collective, such as "all_reduce".
        where: file and line of the call, or "".
    """

    def __init__(self, kind: str, where: str):
        call = f"{kind} ({where})" if where else kind
        super().__init__(
            f"{call} runs among ranks outside group", "pass group=group to every call of torch.distributed"
        )


class PeerStopped(BaseException):
    """Ends the case on this rank, because another rank has ended it; the reason is reported on that other rank."""


class Unlike(Exception):
    """Ends the run of an edited solution as soon as one of its observations differs from the learner's.

    The message is the name of this observation.
    """
