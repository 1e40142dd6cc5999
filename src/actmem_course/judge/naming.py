"""Which edit of our own answer does what the learner's does?  That edit names the mistake."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import CodeType, ModuleType
from typing import Any

from actmem_course.judge.case import NUMBERS, CaseRun, Happened, Unlike, alike, described, differences
from actmem_course.judge.outline import Exercise, cases_of, solution_module
from actmem_course.judge.verdict import PeerStopped, Wrong
from actmem_course.judge.virtual import VirtualRank, VirtualRanks
from actmem_course.judge.workbench import Bench, names_of_subgroups


@dataclass(frozen=True)
class Edit:
    """words: the mistake, in a sentence.  source: our module after it."""

    words: str
    source: str

    def names(self, file: str) -> dict | None:
        """What the edited module defines; None if it can't be run."""
        names = {"__name__": "edited", "__file__": file}
        try:
            for definition in self.source.split("\n\n\n"):
                exec(_compiled(definition), names)
        except Exception:
            return None
        return names


@lru_cache(maxsize=5000)
def _compiled(definition: str) -> CodeType:
    """One edit differs from the next in a definition or two, and to compile all of them takes longer than many a case."""
    return compile(definition, "<an edit of ours>", "exec")


def stated(text: str, source: str) -> list[Edit]:
    """The edits of a table of mistakes: in a line ``old -> new | the sentence``, with ``\\n`` for a new line and `` ;; `` between
    several replacements.  source: our module."""
    found = []
    for line in filter(None, (line.removeprefix(8 * " ") for line in text.splitlines() if line.strip())):
        changes, _, words = line.rpartition(" | ")
        edited = source
        for change in changes.split(" ;; "):
            # Backquotes hold a piece together that begins or ends with spaces.
            old, _, new = (part.replace("\\n", "\n") for part in change.partition(" -> "))
            old = old[1:-1] if old.startswith("`") else old
            assert old in edited, f"our solution no longer has {old!r}, of the mistake {words!r}"
            edited = edited.replace(old, new)
        found.append(Edit(words, edited))
    return found


def check_case(exercise: Exercise, b: Bench) -> str | None:
    """One rank's check, for ranks that are processes; a remark, or None.  Raises Wrong."""
    run = CaseRun(b)
    remark = exercise.check(run)
    if run.seen:
        ours = CaseRun(b.with_functions(vars(solution_module(exercise.lab))))
        exercise.check(ours)
        found, right = (Happened([dict(one.seen) for _ in range(b.size)], []) for one in (run, ours))
        for name, seen in ours.seen.items():
            if seen.how in ("total", "pattern"):  # what one rank alone can't judge
                for outcome, one in ((found, run), (right, ours)):
                    for own, value in zip(outcome.seen, b.gather(one.seen[name].value)):
                        own[name] = replace(seen, value=value)
        if wrong := differences(found, right):
            raise Wrong(described(found, right, wrong)[0])
    return remark


class Naming:
    """Judges one exercise on virtual ranks.  progress: called while edits are tried."""

    def __init__(self, exercise: Exercise, ranks: VirtualRanks, progress: Callable[..., None]):
        self.exercise, self.ranks, self.progress = exercise, ranks, progress
        self.module = solution_module(exercise.lab)

    def groups(self) -> dict[int, str]:
        """On which groups the case runs: -1 is all ranks, the others those of ``Bench.subgroups``, by their names."""
        found = {-1: ""}
        if self.exercise.takes_group and self.ranks.size > 1:
            found |= dict(enumerate(names_of_subgroups(self.ranks.size)))
        return found

    def ours(self, group: int) -> Happened:
        """What our own answer does."""
        key = self._key(group)
        if key not in _OURS:
            outcome = self.run([vars(self.module)] * self.ranks.size, group)
            for error in outcome.errors:
                if error is not None:
                    raise error
            _OURS[key] = outcome
        return _OURS[key]

    def run(self, spaces: list[dict], group: int, like: Happened | None = None) -> Happened:
        """The case on every rank of a group.  like: what it is compared with; the run ends where it does something else."""
        runs: list[CaseRun | None] = [None] * self.ranks.size

        def job(rank: VirtualRank) -> Any:
            b = Bench(spaces[rank.number], rank, self.ranks.device, self.progress)
            if group >= 0:
                b = list(b.subgroups())[group]
            run = runs[rank.number] = CaseRun(b, like.seen[rank.number] if like else None)
            return self.exercise.check(run)

        said = self.ranks.run(job, spaces[0].get("__file__", ""))
        errors = [one if isinstance(one, BaseException) else None for one in said]
        remark = next((one for one in said if isinstance(one, str)), "")
        return Happened([run.seen if run else {} for run in runs], errors, remark)

    def differs(self, found: Happened, group: int) -> bool:
        """Whether anything that was seen is wrong."""
        return any(found.seen) and bool(differences(found, self.ours(group)))

    def diagnosis(self, found: Happened, group: int) -> str:
        """What is wrong with the numbers, the bytes or the exchanges, or which edit fails in the same way; "" if nothing is known."""
        right = self.ours(group) if any(found.seen) else found  # what only raises has nothing to compare
        wrong = differences(found, right)
        if not wrong:
            if group >= 0 or not any(found.errors):
                return ""
            ruled = all(error is None or isinstance(error, (Wrong, PeerStopped)) for error in found.errors)
            if not ruled and not any(found.seen) and self._ours_raises(found, group):
                return ""  # this machine is to blame, say its memory
            return self.edit_like(found, (), group)[0]
        said, explained = described(found, right, wrong)
        whole, part = self.edit_like(found, list(wrong), group)
        costs = right.seen[0][next(iter(wrong))].how not in NUMBERS
        return whole or (said if explained and not costs else part or said)

    def _ours_raises(self, found: Happened, group: int) -> bool:
        """Whether our own answer raises the same.  What it once did without an error, only the system can take from it."""
        key, of_system = self._key(group), (MemoryError, OSError, RuntimeError)
        if key in _OURS and not any(isinstance(error, of_system) for error in found.errors):
            return False
        outcome = self.run([vars(self.module)] * self.ranks.size, group)
        if not any(outcome.errors):
            _OURS[key] = outcome
        return _same(outcome, found)

    def _key(self, group: int) -> tuple:
        return self.exercise.number, self.ranks.size, self.ranks.device, group

    def edit_like(self, found: Happened, wrong: Sequence[str], group: int) -> tuple[str, str]:
        """The words of the first edit that does all that the learner's does; and if none does, all up to what is wrong first.

        Where the numbers are right, all that is wrong costs the same.  A whole number may be the same by chance.
        """
        partly = ""
        costs = bool(wrong) and self.ours(group).seen[0][wrong[0]].how not in NUMBERS
        wrong = wrong if costs else wrong[:1]
        for edit in stated_edits(self.exercise):
            if (names := edit.names(self.module.__file__ or "")) is None:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of what an edit of ours does
                outcome = self.run([names] * self.ranks.size, group, found)
            self.progress()
            there = [
                all(name in a and alike(a[name], b.get(name)) for a, b in zip(outcome.seen, found.seen))
                for name in wrong
            ]
            if costs:  # right numbers may be rounded otherwise
                more = set(differences(outcome, self.ours(group))) - set(wrong)
                enough = any(there[:1]) and not more and _same(outcome, found, ("any",))
                whole = enough and all(there)
            else:
                whole, enough = _same(outcome, found), any(there) and not isinstance(found.value(wrong[0])[0], int)
                if wrong and (whole or enough):
                    # An edit that changes nothing there is like an answer that is nearly right.
                    differs = wrong[0] in differences(outcome, self.ours(group))
                    differs = differs and not self._keeps_more(outcome, found, group)
                    whole, enough = whole and differs, enough and differs
            if whole:
                return edit.words, ""
            partly = partly or edit.words * enough
        return "", partly

    def _keeps_more(self, one: Happened, other: Happened, group: int) -> bool:
        """Whether only the one run keeps what nothing needs."""
        ours = self.ours(group)
        more, also = ({n for n in differences(run, ours) if ours.seen[0][n].how == "kept"} for run in (one, other))
        return bool(more - also)


#: What our own answers do, by exercise, number of ranks, device and group.
_OURS: dict[tuple, Happened] = {}


def _same(one: Happened, other: Happened, hows: Sequence[str] = NUMBERS) -> bool:
    """Whether two runs did the same on every rank, whatever is right.  hows: in what is compared so."""
    if any(isinstance(error, Unlike) for error in one.errors):
        return False
    if list(map(_signature, one.errors)) != list(map(_signature, other.errors)):
        return False
    for a, b in zip(one.seen, other.seen):
        for name in a.keys() | b.keys():
            how = (a.get(name) or b[name]).how
            if how in hows and how != "pattern" and not alike(a.get(name), b.get(name)):
                return False
    patterns = [name for name, seen in one.seen[0].items() if seen.how == "pattern"]
    return not any(name in differences(one, other) for name in patterns)


def _signature(error: BaseException | None) -> tuple[str, str]:
    return type(error).__name__, "" if isinstance(error, PeerStopped) else str(error)


def source_of(module: ModuleType) -> str:
    """The text of a module."""
    return inspect.getsource(module)


@cache
def stated_edits(exercise: Exercise) -> list[Edit]:
    """The stated mistakes of an exercise."""
    mistakes: dict[str, str] = cases_of(exercise.lab).MISTAKES
    return stated(mistakes.get(exercise.number, ""), source_of(solution_module(exercise.lab)))
