"""What the judge says about an exercise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Not written, and waiting for another exercise; ended by another exercise, or in a file that can't be loaded.
PASSED, OPEN, BLOCKED, SKIPPED, WRONG, ERROR = "passed", "todo", "blocked", "not judged", "wrong", "error"


@dataclass(frozen=True)
class Verdict:
    """One exercise's outcome.

    status: passed, todo (not written), blocked (right once another exercise is), not judged, wrong (it runs and
    does something else), error (it raises).  diagnosis: what is wrong, in the learner's terms; on
    passed a remark or nothing.  where: file and line, if there is one.
    """

    exercise: str
    function: str
    status: str
    diagnosis: str = ""
    where: str = ""


class Wrong(Exception):
    """Raised by a check: the learner's code does something else than asked.  The message is the diagnosis."""

    def __init__(self, words: str):
        super().__init__(clipped(words, 1000))  # it may quote what a learner's function returned


def clipped(text: str, most: int = 200) -> str:
    """The first characters of a text, at most so many."""
    return text if len(text) <= most else text[: most - 1] + "…"


def refuse(faults: Iterable[tuple[object, str]]) -> None:
    """Raise Wrong with the first sentence whose condition holds."""
    for holds, words in faults:
        if holds:
            raise Wrong(words)


class OutOfStep(Wrong):
    """The ranks are about to do different things.  Every rank finds the same message."""


class OtherGroup(Wrong):
    """A collective is about to run among other ranks than those of the group that the function was given."""

    def __init__(self, kind: str, where: str):
        super().__init__(
            f"{kind}{where and f' ({where})'} exchanges with ranks outside group: pass group=group to every call of torch.distributed"
        )


class PeerStopped(BaseException):
    """Another rank has ended its judging, so this one cannot go on; the other has the reason."""
