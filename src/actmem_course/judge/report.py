"""Report verdicts: on the screen as they come, and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill

from rich.console import Console
from rich.text import Text

from actmem_course.judge.exercise import Lab
from actmem_course.judge.learner_progress import reading
from actmem_course.judge.verdict import BLOCKED, ERROR, OPEN, PASSED, SKIPPED, WRONG, Verdict
from actmem_tools.command_line import screen

_YELLOW, _RED = "bold yellow", "bold red"
_STYLES = {PASSED: "bold green", OPEN: _YELLOW, BLOCKED: _YELLOW, SKIPPED: _YELLOW, WRONG: _RED, ERROR: _RED}


class Report:
    """Shows a learner the verdicts on a file.

    Args:
        lab: the lab to which the file belongs.
        script: the file's path as the learner would type it.
        asked: how many exercises are judged.
        ranks: on how many ranks the exercises are judged.
    """

    def __init__(self, lab: Lab, script: str, asked: int, ranks: int = 1):
        self.lab, self.script, self.asked, self.ranks = lab, script, asked, ranks
        self.console = screen(highlight=False, emoji=False)
        self.verdicts: list[Verdict] = []
        # On a stream of its own, so that a file of the verdicts has no half-drawn lines in it.
        self._status = Console(stderr=True).status("")

    def begin(self, doing: str) -> None:
        """Show a line on standard error, which the next output replaces.

        Args:
            doing: what the judge does now: "judging 2.1".
        """
        self._status.update(doing)
        self._status.start()

    def line(self, text: str, style: str = "") -> None:
        """Print a line of text in place of the line that ``begin`` shows.

        Args:
            text: the line to print, such as "3 of 5 passed".
            style: a style of rich, such as "bold"; "" for plain text.
        """
        self._status.stop()
        self.console.print(Text(text, style=style), soft_wrap=True)

    def show(self, verdict: Verdict, why: Sequence[str] = ()) -> None:
        """Print a verdict: one line, and below it the symptom and ``why``.

        A second verdict on the same exercise replaces the first.  Exercises that aren't written yet are printed at the
        end, together in one line.

        Args:
            verdict: the verdict on one exercise.
            why: the lines on cause and repair to print, from ``LearnerProgress.tell`` or ``Verdict.why``.
        """
        self._status.stop()
        self.verdicts = [before for before in self.verdicts if before.exercise != verdict.exercise] + [verdict]
        if verdict.status == OPEN and not verdict.diagnosis:
            return
        width = max(len(exercise.function) for exercise in self.lab.exercises) + 2
        line = Text(f"  {verdict.exercise}  {verdict.function.ljust(width)}")
        line.append("not written yet" if verdict.status == OPEN else verdict.status, style=_STYLES[verdict.status])
        if verdict.where:
            line.append(f"  {verdict.where}", style="dim")
        self.console.print(line, soft_wrap=True)
        for text in filter(None, (verdict.diagnosis, *why)):
            lines = fill(text, self.console.width - 2, initial_indent=" " * 7, subsequent_indent=" " * 7)
            self.console.print(Text(lines), soft_wrap=True)

    @property
    def all_passed(self) -> bool:
        """Whether all of the ``asked`` exercises have been judged and have passed."""
        return len(self.verdicts) == self.asked and all(verdict.status == PASSED for verdict in self.verdicts)

    def end(self) -> None:
        """Print which exercises aren't written yet, how many have passed, and which exercise to do next."""
        self._status.stop()
        if unwritten := [v.exercise for v in self.verdicts if v.status == OPEN and not v.diagnosis]:
            self.line(f"  not written yet: {', '.join(unwritten)}", _STYLES[OPEN])
        passed = sum(verdict.status == PASSED for verdict in self.verdicts)
        self.line(f"{passed} of {len(self.verdicts)} passed", "bold")
        if left := [verdict for verdict in self.verdicts if verdict.status != PASSED]:
            first = next((verdict for verdict in left if verdict.status not in (BLOCKED, SKIPPED)), left[0])
            (exercise,) = (e for e in self.lab.exercises if e.number == first.exercise)
            hint = f"and for a hint: python {self.script} --hint {exercise.number}"
            self.line(f"next: {exercise.number}, {hint}; read {reading(self.lab, exercise)}")

    def json(self) -> str:
        """Return the lab's name, the number of ranks and all verdicts as JSON text."""
        verdicts = [asdict(verdict) for verdict in sorted(self.verdicts, key=lambda verdict: verdict.exercise)]
        result = {"lab": self.lab.name, "ranks": self.ranks, "verdicts": verdicts}
        return json.dumps(result, ensure_ascii=False, indent=1) + "\n"
