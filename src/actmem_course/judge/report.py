"""Verdicts on the screen, a line each as they come, and in a file."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from actmem_course.files import write_text
from actmem_course.judge.learner_progress import reading
from actmem_course.judge.outline import Lab
from actmem_course.judge.verdict import BLOCKED, ERROR, OPEN, PASSED, SKIPPED, WRONG, Verdict
from actmem_tools.command_line import screen

_YELLOW, _RED = "bold yellow", "bold red"
_STYLES = {PASSED: "bold green", OPEN: _YELLOW, BLOCKED: _YELLOW, SKIPPED: _YELLOW, WRONG: _RED, ERROR: _RED}


class Report:
    """Writes verdicts for a learner.

    script: the learner's file, as typed.  asked: how many exercises are judged.  reward: what was measured, as JSON
    has it.
    """

    def __init__(self, lab: Lab, script: str, asked: int, ranks: int = 1, json_file: Path | None = None):
        self.lab, self.script, self.json_file, self.asked, self.ranks = lab, script, json_file, asked, ranks
        self.console = screen(highlight=False, emoji=False)
        self.verdicts: list[Verdict] = []
        self.reward: dict | None = None
        self._what = ""
        # On a stream of its own, so that a file of the verdicts has no half-drawn lines in it.
        self._status = Console(stderr=True).status("")

    def head(self, how: str) -> None:
        """The lab's title, and on what it runs."""
        self.console.print(Text(f"{self.lab.title} ({how})", style="bold"))

    def begin(self, what: str) -> None:
        """Show what is going on now."""
        self._what = what
        self._status.update(what)
        self._status.start()

    def note(self, text: str) -> None:
        """Show how far it is."""
        if text:
            self._status.update(f"{self._what}: {text}")

    def pause(self) -> None:
        """Nothing is going on."""
        self._status.stop()

    def printed(self, line: str) -> None:
        """What the learner's code prints."""
        self._status.stop()
        self.console.print(Text(f"    {line}", style="dim"), soft_wrap=True)
        self._status.start()

    def show(self, verdict: Verdict, why: Sequence[str] = ()) -> None:
        """One verdict: a line, and below it what is wrong, and what of the cause and the repair is told."""
        self._status.stop()
        self.verdicts.append(verdict)
        width = max(len(exercise.function) for exercise in self.lab.exercises) + 2
        line = Text(f"  {verdict.exercise}  {verdict.function.ljust(width)}")
        line.append("not written yet" if verdict.status == OPEN else verdict.status, style=_STYLES[verdict.status])
        if verdict.where:
            line.append(f"  {verdict.where}", style="dim")
        self.console.print(line, soft_wrap=True)
        for text in filter(None, (verdict.diagnosis, *why)):
            self.console.print(Padding(Text(text), (0, 2, 0, 7)))

    @property
    def all_passed(self) -> bool:
        """Whether all that was asked for has passed."""
        return len(self.verdicts) == self.asked and all(verdict.status == PASSED for verdict in self.verdicts)

    def correct(self, verdict: Verdict, why: Sequence[str] = ()) -> None:
        """Another verdict of an exercise that has one."""
        self.verdicts = [before for before in self.verdicts if before.exercise != verdict.exercise]
        self.show(verdict, why)
        self.verdicts.sort(key=lambda verdict: verdict.exercise)

    def end(self, farewell: str = "") -> None:
        """The sum of it, what to do next, and the file; ``farewell`` if something is left to do."""
        self._status.stop()
        passed = sum(verdict.status == PASSED for verdict in self.verdicts)
        self.console.print(Text(f"{passed} of {len(self.verdicts)} passed", style="bold"))
        if passed < len(self.verdicts):
            self.console.print(Text(self._next_step()), soft_wrap=True)
            if farewell:
                self.console.print(Text(farewell, style="dim"), soft_wrap=True)

    def write(self) -> None:
        """The file, if one is asked for: verdicts, and what was measured, on what."""
        if self.json_file:
            write_text(self.json_file, self.json())

    def json(self) -> str:
        """Lab, ranks, versions, verdicts so far, and the reward."""
        found = {
            "lab": self.lab.name,
            "ranks": self.ranks,
            "versions": _versions(),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "reward": self.reward,
        }
        return json.dumps(found, ensure_ascii=False, indent=1) + "\n"

    def _next_step(self) -> str:
        """What a learner does now: the first exercise that has not passed, and how to get a hint."""
        open_ones = [verdict for verdict in self.verdicts if verdict.status != PASSED]
        left = [verdict for verdict in open_ones if verdict.status not in (BLOCKED, SKIPPED)] or open_ones
        (exercise,) = (e for e in self.lab.exercises if e.number == left[0].exercise)
        hint = f"and for a hint: python {self.script} --hint {exercise.number}"
        return f"next: {exercise.number}, {hint}; read {reading(self.lab, exercise)}"


def _versions() -> dict[str, str]:
    """What judged: Python, torch and the course."""
    found = {"python": platform.python_version()}
    for name in ("torch", "actmem"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
