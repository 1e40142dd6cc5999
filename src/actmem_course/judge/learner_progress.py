"""Remember a learner's progress in all labs.

Remembered are the exercises that have passed, what the learner has been told about wrong ones, and the hints given.
The progress of files in ``my/`` is stored in ``my/.progress.json``, so each clone has its own; that of other files in
the user's cache folder.  This module doesn't import torch.
"""

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
    """A learner's progress, read from its file; methods that change it write the file again.

    Args:
        script: the learner's file that is judged; its folder decides where the progress is stored.

    Attributes:
        path: the file with the progress.
        passed: numbers of exercises that have passed.
        hints: how many hints were given, by the exercise's number.
        wrong: for exercises whose latest verdict was wrong, by number: symptom, cause, repair, and how many of the last
            two the learner has been told (0, 1 or 2).
    """

    def __init__(self, script: Path):
        mine = script.resolve().is_relative_to(MINE.resolve())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actmem"
        self.path = MINE / ".progress.json" if mine else cache / "progress.json"
        progress = read_object(self.path)
        self.passed = set(progress.get("passed", ()))
        self.hints: dict[str, int] = progress.get("hints", {})
        self.wrong: dict[str, list] = progress.get("wrong", {})

    def note(self, verdicts: Iterable[Verdict]) -> None:
        """Store which of the judged exercises have passed and which no longer pass.

        Args:
            verdicts: the verdicts on the judged exercises; what is stored of other exercises stays as it is.
        """
        for verdict in verdicts:
            if verdict.status == PASSED:
                self.passed.add(verdict.exercise)
                self.wrong.pop(verdict.exercise, None)
            elif verdict.status != SKIPPED:
                self.passed.discard(verdict.exercise)
        self._write()

    def tell(self, verdict: Verdict, unchanged: bool = False, everything: bool = False) -> list[str]:
        """Decide how much to tell the learner about a verdict in addition to its symptom, and store that.

        The first time the learner is told nothing more.  When the same verdict comes a second time, the learner is told
        the cause; the third time the repair, too.

        Args:
            verdict: the verdict on one exercise.
            unchanged: whether the exercise's text hasn't changed since this verdict was given; the verdict then isn't
                counted as coming again.
            everything: whether to tell cause and repair at once.

        Returns: the lines of ``verdict.why`` to tell; none if the verdict isn't WRONG or ERROR.
        """
        if verdict.status not in (WRONG, ERROR):
            return []
        *before, told = self.wrong.get(verdict.exercise, [0])
        now = [verdict.diagnosis, verdict.cause, verdict.repair]
        told = told + (not unchanged) if before == now else 0
        told = len(verdict.why) if everything else min(told, len(verdict.why))
        self.wrong[verdict.exercise] = [*now, told]
        self._write()
        return verdict.why[:told]

    def next_hints(self, exercise: Exercise) -> list[str]:
        """Give one more hint for an exercise, and store how many were given.

        The order is: the first hint, which asks a question; cause and repair of the latest verdict, if it was wrong;
        then the other hints, the last of which is nearly the answer.

        Args:
            exercise: the exercise for which the learner asks for a hint.

        Returns: the hints given so far, with the new one.
        """
        *symptom, cause, repair, told = self.wrong.get(exercise.number) or ["", "", 0]
        why = Verdict(exercise.number, exercise.function, WRONG, cause=cause, repair=repair).why
        all_hints, count = hints()[exercise.number], self.hints.get(exercise.number, 0)
        if count and told < len(why):
            told += 1
            self.wrong[exercise.number] = [*symptom, cause, repair, told]
        else:
            count = min(count + 1, len(all_hints))
            self.hints[exercise.number] = count
        self._write()
        return [*all_hints[:1][:count], *why[:told], *all_hints[1:count]]

    def summary(self) -> str:
        """Return a line of text that says how many exercises have passed, in all labs together and in each lab."""
        done = [sum(exercise.number in self.passed for exercise in lab.exercises) for lab in ALL_LABS]
        total = sum(len(lab.exercises) for lab in ALL_LABS)
        counts = (f"{lab.title.split()[1]} {n}/{len(lab.exercises)}" for lab, n in zip(ALL_LABS, done))
        return f"all labs: {sum(done)} of {total} exercises passed ({', '.join(counts)})"

    def next(self, lab: Lab) -> tuple[Lab, Exercise] | None:
        """Find the exercise to do next: the first that hasn't passed in a lab, or, if all there have, in any lab.

        Args:
            lab: the lab in which to look first.

        Returns: the exercise with its lab; None if all exercises of all labs have passed.
        """
        labs = (lab, *ALL_LABS)
        return next(((each, e) for each in labs for e in each.exercises if e.number not in self.passed), None)

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"passed": sorted(self.passed), "hints": self.hints, "wrong": self.wrong}
            write_text(self.path, json.dumps(kept, indent=1) + "\n")
        except OSError:
            pass  # if nothing can be written, nothing is remembered


def reading(lab: Lab, exercise: Exercise) -> str:
    """Return a text that names the notebook and the section that explain an exercise: ``notebooks/….ipynb, “…”``.

    Args:
        lab: the lab to which the exercise belongs.
        exercise: the exercise.
    """
    return f"notebooks/{exercise.chapter or lab.chapter}.ipynb, “{exercise.section}”"
