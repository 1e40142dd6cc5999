"""The command line of a lab: judge the file once or at every save (--watch), judge our solution, or give a hint.

This process doesn't import torch, so that it starts fast; the judge's process does.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.text import Text

from actmem.config import ConfigError, check_size
from actmem_course.arguments import LabParser, add_json_argument
from actmem_course.copies import typed
from actmem_course.files import check_files, write_text
from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.learner_progress import LearnerProgress, reading
from actmem_course.judge.outline import lab_of_file
from actmem_course.judge.parent import JudgeProcess, Outdated, Stuck, signals_end
from actmem_course.judge.report import Report
from actmem_course.judge.verdict import PASSED, SKIPPED, WRONG, Verdict
from actmem_tools.command_line import screen

#: With --watch, seconds between two looks at the learner's file.
_LOOK_SECONDS = 0.1
#: A file of no bytes is taken to be empty after so many seconds: many editors empty a file before they write it.
_EMPTY_SECONDS = 2.0
#: What ``_stamp`` returns for an empty file.
_EMPTY = (0, 0)


def main(functions: dict) -> int:
    """Run the command line of a lab's file.

    Args:
        functions: the ``globals()`` of the lab's file.

    Returns: the exit code: 0 if all judged exercises have passed, or after a hint; else 1.  Wrong use of the command
        line ends the process with 2.
    """
    script = Path(functions.get("__file__") or "a lab")
    doc = functions.get("__doc__") or ""
    with LabParser(prog=script.name).refusing():
        if not script.is_file():
            raise ConfigError("file", "a lab is judged as a file: python my/labs/lab1_count_bytes.py")
        lab = lab_of_file(script, doc)
    parser = _parser(lab, script.name, doc)
    args = parser.parse_args()
    with parser.refusing():
        exercises = lab.choose([number for text in args.only or () for number in text.split(",")], "only")
        if args.hint is not None:
            return _hint(lab.choose([args.hint], "hint")[0], script)
        check_files(args, "json")
        if args.watch and (args.json or args.solution):
            raise ConfigError("watch", "judges at each save and writes no files: leave --json and --solution out")
        real = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        size = _size(lab, args, real)
    judging = _Judging(lab, exercises, args, script, size)
    try:
        if real:
            return judging.on_this_rank()
        with signals_end():
            code = judging.watch() if args.watch else judging.once()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        do = "read" if error.filename == str(script) else "write"
        print(f"{script.name}: cannot {do} {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        judging.end()
    return code


class _Judging:
    """Judges one file, once or whenever it is saved, and reports.

    Args:
        lab: the file's lab.
        exercises: those to judge.
        args: the command line's options.
        script: the learner's file.
        size: how many ranks there are.
    """

    def __init__(self, lab: Lab, exercises: tuple[Exercise, ...], args, script: Path, size: int):
        self.lab, self.exercises, self.args, self.script, self.size = lab, exercises, args, script, size
        self.process = JudgeProcess()
        #: The file that is judged: the learner's, or our solution.
        self.file = Path(__file__).parent / "solutions" / f"{lab.name}.py" if args.solution else script
        #: With --watch, a second process, which takes over at once if an answer ends the first one.
        self.spare = JudgeProcess()

    @property
    def progress(self) -> LearnerProgress:
        """The learner's progress, read from its file each time, because commands in other terminals write it too."""
        return LearnerProgress(self.script)

    def end(self) -> None:
        """End both processes."""
        self.process.end()
        self.spare.end()

    def once(self) -> int:
        """Judge the file once, and return the exit code."""
        source, report = self.file.read_bytes(), self._report()
        self._verdicts(report, source, changed_only=False)
        report.end()
        self._keep(report)
        return 0 if report.all_passed else 1

    def on_this_rank(self) -> int:
        """Judge the file as one of torchrun's ranks, and return the exit code."""
        from actmem_course.judge.real_ranks import judge_on_this_rank  # which loads torch

        report = self._report() if _speaks() else Report(self.lab, "", len(self.exercises))
        code = judge_on_this_rank(self.lab, self.exercises, self.args, self.file, report)
        if _speaks():
            self._keep(report)
        return code

    def watch(self) -> int:
        """Judge whenever the file is saved, without end, in a process that stays.

        An exercise whose text hasn't changed keeps its verdict.
        """
        console = screen(highlight=False, emoji=False)
        console.print(Text(f"watching {typed(self.script)}: save it and it is judged; Ctrl-C ends this", style="dim"))
        before: tuple[int, int] | None = None
        while True:
            self.process.start()
            now = _stamp(self.script)
            if now is None or now == before:
                time.sleep(_LOOK_SECONDS)
                continue
            if now == _EMPTY:
                console.print(Text("the file is empty: nothing is judged", style="dim"))
                before = now
                continue
            try:
                source = self.script.read_bytes()
            except FileNotFoundError:  # an editor is about to put a new file there
                continue
            before, began, report = now, time.monotonic(), self._report()
            try:
                self._verdicts(
                    report, source, changed_only=True, outdated=lambda: _stamp(self.script) not in (None, before)
                )
                report.end()
                report.line(f"judged in {time.monotonic() - began:.1f} s", "dim")
                self._keep(report)
            except Outdated:
                if self.process.busy:
                    self._replace()
                report.line("saved again: judging the new one", "dim")
                self.progress.note(report.verdicts)
            sys.stdout.flush()
            self.spare.start()

    def _report(self) -> Report:
        report = Report(self.lab, typed(self.script), len(self.exercises), self.size)
        ranks = "" if self.lab.one_process else f"{self.size} rank{'s' if self.size > 1 else ''}"
        how = ", ".join(filter(None, ("our solution" if self.args.solution else "", ranks)))
        report.line(f"{self.lab.title} ({how})" if how else self.lab.title, "bold")
        return report

    def _verdicts(self, report: Report, source: bytes, **more: Any) -> None:
        """Have all exercises judged, and show each verdict.

        If an exercise ends the process or takes too long, its verdict says so, and another process judges the rest.

        Args:
            report: shows the verdicts.
            source: the file's text.
            more: further arguments of ``JudgeProcess.ask``.
        """
        left, endless = list(self.exercises), list[str]()
        while left:
            report.begin("judging")
            running = ""
            try:
                for message in self.process.ask(
                    str(self.file.resolve()),
                    do="judge",
                    lab=self.lab.name,
                    # The process doesn't read the file itself: an editor may have written another text by then.
                    source=source.decode("latin-1"),
                    size=self.size,
                    only=[exercise.number for exercise in left],
                    passed=[verdict.function for verdict in report.verdicts if verdict.status == PASSED],
                    endless=endless,
                    **more,
                ):
                    running = message.get("begin", running)
                    self._hear(report, message)
                return
            except Stuck as stuck:
                self._replace()
                shown = {verdict.exercise for verdict in report.verdicts}
                left = [exercise for exercise in self.exercises if exercise.number not in shown]
                if not running and not shown:  # it ended before any exercise began: the file's own statements end it
                    why = str(stuck)
                    for exercise in left:
                        report.show(Verdict(exercise.number, exercise.function, SKIPPED, why))
                        why = ""
                    return
                ended = next((exercise for exercise in left if exercise.number == running), left[0])
                report.show(Verdict(ended.number, ended.function, WRONG, str(stuck)))
                endless.append(ended.function)
                left.remove(ended)

    def _replace(self) -> None:
        """End the process, and put the spare in its place."""
        self.process.end()
        self.process, self.spare = self.spare, self.process

    def _hear(self, report: Report, message: dict[str, Any]) -> None:
        if "begin" in message:
            report.begin(f"judging {message['begin']}")
        elif "printed" in message:
            report.line(f"    {message['printed']}", "dim")
        elif "verdict" in message:
            verdict = Verdict(**message["verdict"])
            everything = self.args.explain or self.args.solution
            report.show(verdict, self.progress.tell(verdict, message["unchanged"], everything))

    def _keep(self, report: Report) -> None:
        """Write the verdicts as JSON if that was asked for, and remember which exercises have passed."""
        if self.args.json:
            write_text(self.args.json, report.json())
        if self.args.solution:
            return
        progress = self.progress
        progress.note(report.verdicts)
        report.line(progress.summary(), "dim")
        upcoming = progress.next(self.lab)
        if upcoming and report.all_passed:
            lab, exercise = upcoming
            report.line(f"next: {exercise.number} in {lab.name}.py; read {reading(lab, exercise)}")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is saved: its time and its size.

    It is None if the file isn't there, or was emptied a moment ago, as many editors do before they write it.
    """
    try:
        state = path.stat()
    except OSError:
        return None
    if state.st_size:
        return state.st_mtime_ns, state.st_size
    return _EMPTY if time.time() - state.st_mtime > _EMPTY_SECONDS else None


def _speaks() -> bool:
    """Return whether this process prints: it is the only one, or rank 0 of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def _size(lab: Lab, args, real: bool) -> int:
    """Return on how many ranks the file is judged.  Raises ConfigError on options that don't go with torchrun."""
    if real and args.watch:
        raise ConfigError("watch", "needs no torchrun: ranks that stay are threads of one process")
    if lab.one_process:
        return 1
    if real and args.ranks is not None:
        raise ConfigError("ranks", "torchrun has started the ranks: leave one of them out")
    if real:
        return int(os.environ["WORLD_SIZE"])
    return 4 if args.ranks is None else check_size("ranks", args.ranks, largest=64)


def _parser(lab: Lab, script: str, doc: str) -> LabParser:
    parser = LabParser(prog=script, description=doc.partition("\n\n")[2] or lab.title)
    parser.add_argument("--hint", metavar="N", help="one more hint for exercise N, such as 2.1, and nothing else")
    parser.add_argument("--explain", action="store_true", help="say symptom, cause and repair at once, not one a run")
    parser.add_argument("--watch", action="store_true", help="judge again at each save of the file, within a second")
    several = "judge exercise N only (again, or N,M, for several)"
    parser.add_argument("--only", metavar="N", action="append", help=several)
    parser.add_argument("--solution", action="store_true", help="judge our solution instead of this file")
    add_json_argument(parser)
    under = "under torchrun (default: GPUs if there is one for each rank)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=under)
    if not lab.one_process:
        parser.add_argument("--ranks", type=int, metavar="N", help="how many ranks (default: 4)")
    return parser


def _hint(exercise: Exercise, script: Path) -> int:
    if not _speaks():
        return 0
    console = screen(highlight=False, emoji=False)
    console.print(Text(f"{exercise.number} {exercise.function}", style="bold"))
    for hint in LearnerProgress(script).next_hints(exercise):
        console.print(Text(f"• {hint}"))
    return 0
