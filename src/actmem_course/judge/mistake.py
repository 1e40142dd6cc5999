"""Mistakes that somebody has stated: each is an edit of our solution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType


class Mistake:
    """A mistake.

    Args:
        cause: what in the code is wrong, in a learner's words.
        repair: what to do; "" if the cause says it.
        edits: ways to make the mistake: each has pieces of our solution, and what to put in place of them.
    """

    def __init__(self, cause: str, repair: str, *edits: Mapping[str, str]):
        self.cause, self.repair, self.edits = cause, repair, edits

    def sources(self, solution: str) -> Iterator[str]:
        """The text of our solution after each edit."""
        for edit in self.edits:
            edited = solution
            for old, new in edit.items():
                assert old in edited, f"our solution no longer has {old!r}, of the mistake {self.cause!r}"
                edited = edited.replace(old, new)
            yield edited


def replacing(old: str, *mistakes: tuple[str, str, str]) -> list[Mistake]:
    """Mistakes that put something else in place of one piece of our solution.

    mistakes: cause, repair and the new piece of each.
    """
    return [Mistake(cause, repair, {old: new}) for cause, repair, new in mistakes]


def ways(old: str, *new: str) -> list[Mapping[str, str]]:
    """Edits that each put something else in place of one piece of our solution."""
    return [{old: one} for one in new]


def names_of(source: str, file: str) -> dict | None:
    """What an edited solution defines; None if it can't be run."""
    names = {"__name__": "edited", "__file__": file}
    try:
        for definition in source.split("\n\n\n"):
            exec(_compiled(definition), names)
    except Exception:
        return None
    return names


@lru_cache(maxsize=5000)
def _compiled(definition: str) -> CodeType:
    """One edit differs from the next in a definition or two, and to compile all of them takes longer than many a
    case."""
    return compile(definition, "<an edit of ours>", "exec")
