"""Which exercises have passed, over all labs, what was told of those that are wrong, and which hints were given.

Loads no torch.

It is kept beside the learner's copies, in ``my/.progress.json``: for each clone its own.  What is
judged elsewhere is kept in the user's cache folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from actmem_course.copies import MINE
from actmem_course.files import read_object, write_text
from actmem_course.judge.exercise import Exercise, Lab, hints
from actmem_course.judge.outline import ALL_LABS
from actmem_course.judge.verdict import ERROR, PASSED, SKIPPED, WRONG, Verdict


class LearnerProgress:
    """What a learner has done.  script: the file that is judged; it decides where this is kept."""

    def __init__(self, script: Path):
        mine = script.resolve().is_relative_to(MINE.resolve())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actmem"
        self.path = MINE / ".progress.json" if mine else cache / "progress.json"
        found = read_object(self.path)
        self.passed = set(found.get("passed", ()))
        self.hints: dict[str, int] = found.get("hints", {})
        #: Of the latest verdict of an exercise that is wrong: symptom, cause, repair, and how many of the last two were
        #: told.
        self.wrong: dict[str, list] = found.get("wrong", {})

    def note(self, verdicts: Iterable[Verdict]) -> None:
        """Remember what has passed, and what no longer does.  What is not judged keeps its mark."""
        for verdict in verdicts:
            if verdict.status == PASSED:
                self.passed.add(verdict.exercise)
                self.wrong.pop(verdict.exercise, None)
            elif verdict.status != SKIPPED:
                self.passed.discard(verdict.exercise)
        self._write()

    def tell(self, verdict: Verdict, unchanged: bool = False, everything: bool = False) -> list[str]:
        """What the learner hears of a verdict now beside its symptom: nothing at first, then the cause, then the
        repair.

        unchanged: it is an earlier verdict once more.  everything: all of it.
        """
        if verdict.status not in (WRONG, ERROR):
            return []
        *before, told = self.wrong.get(verdict.exercise, [0])
        own = [verdict.diagnosis, verdict.cause, verdict.repair]
        told = told + (not unchanged) if before == own else 0
        told = len(verdict.why) if everything else min(told, len(verdict.why))
        self.wrong[verdict.exercise] = [*own, told]
        self._write()
        return verdict.why[:told]

    def next_hints(self, exercise: Exercise) -> list[str]:
        """The hints and what was told of the latest verdict before, and the next one of both: the first hint, which
        asks a question, then cause and repair, then the other hints, the last of which is nearly the answer."""
        *symptom, cause, repair, told = self.wrong.get(exercise.number) or ["", "", 0]
        why = Verdict(exercise.number, exercise.function, WRONG, cause=cause, repair=repair).why
        own, count = hints()[exercise.number], self.hints.get(exercise.number, 0)
        if count and told < len(why):
            told += 1
            self.wrong[exercise.number] = [*symptom, cause, repair, told]
        else:
            count = min(count + 1, len(own))
            self.hints[exercise.number] = count
        self._write()
        return [*own[:1][:count], *why[:told], *own[1:count]]

    def summary(self) -> str:
        """All labs in a line."""
        done = [sum(exercise.number in self.passed for exercise in lab.exercises) for lab in ALL_LABS]
        total = sum(len(lab.exercises) for lab in ALL_LABS)
        counts = (f"{lab.title.split()[1]} {n}/{len(lab.exercises)}" for lab, n in zip(ALL_LABS, done))
        return f"all labs: {sum(done)} of {total} exercises passed ({', '.join(counts)})"

    def next(self, lab: Lab) -> tuple[Lab, Exercise] | None:
        """The first exercise of a lab that has not passed, or of all labs; None if all have."""
        order = (lab, *ALL_LABS)
        return next(((one, e) for one in order for e in one.exercises if e.number not in self.passed), None)

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"passed": sorted(self.passed), "hints": self.hints, "wrong": self.wrong}
            write_text(self.path, json.dumps(kept, indent=1) + "\n")
        except OSError:
            pass  # where nothing can be written, nothing is remembered


def reading(lab: Lab, exercise: Exercise) -> str:
    """Where an exercise's idea is explained."""
    return f"notebooks/{exercise.chapter or lab.chapter}.ipynb, “{exercise.section}”"
